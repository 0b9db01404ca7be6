"""Assembles the form of `kernels/` that the Hugging Face Kernel Hub takes.

Usage: `python tools/kernel_hub.py DIRECTORY`, or `make hub`.

The directory becomes a repository of the Hub, from which the package `kernels` loads the modules
without fastdpo:

    README.md
    build/torch-cuda/      one folder for each backend, for all versions of torch and Python
        __init__.py        imports the modules
        metadata.json
        *.py               the files of kernels/
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "kernels"
NAME = "fastdpo"
VERSION = 1
"""Of the functions' arguments and results: a change that breaks a caller needs the next number."""

BACKENDS = ("cuda", "rocm")
LICENSE = "Apache-2.0"

CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

Triton kernels of fastdpo for preference training: fused LM heads and
attention over packed batches. The docstring of each module has its formulas, shapes and dtypes.

```python
from pathlib import Path

from kernels import get_local_kernel

token_logps = get_local_kernel(Path("path/to/this/folder")).token_logps
```
"""

INIT = '''"""Triton kernels of fastdpo. The docstring of each module has its formulas, shapes and dtypes."""

from . import {modules}

__all__ = [{names}]
'''


def build(directory: Path) -> None:
    """Writes the repository to a directory that does not exist or is empty.

    Raises:
        FileExistsError: there are files in the directory, which a new version might not replace.
    """
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty")
    sources = {path.name: path.read_bytes() for path in sorted(KERNELS.glob("*.py"))}
    modules = [name.removesuffix(".py") for name in sources]
    init = INIT.format(modules=", ".join(modules), names=", ".join(f'"{name}"' for name in modules))
    files = {"__init__.py": init.encode(), **sources}
    digest = hashlib.sha256(b"\0".join(files.values())).hexdigest()[:12]
    for backend in BACKENDS:
        variant = directory / "build" / f"torch-{backend}"
        variant.mkdir(parents=True)
        metadata = {
            "id": f"_{NAME}_{backend}_{digest}",  # the name of the imported module, of which a process may have several
            "name": NAME,
            "version": VERSION,
            "license": LICENSE,
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        for name, content in files.items():
            (variant / name).write_bytes(content)
    (directory / "README.md").write_text(CARD, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="must be empty, or not exist")
    build(parser.parse_args().directory)
