"""The extensions that DeepSpeed compiles when a training begins."""

import os
import sys
from pathlib import Path


def keep_in_environment() -> None:
    """Lets the processes of this session keep them in their environment, for which one version of torch compiles.

    A build that was killed leaves a lock, for which every later training waits without end; it is removed.
    """
    directory = Path(sys.prefix) / "torch_extensions"
    for lock in directory.glob("*/lock"):
        lock.unlink(missing_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
