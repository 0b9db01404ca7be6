"""The files that a batch crosses are those that docs/design.md lists."""

import re
import sys
import threading
from pathlib import Path

from transformers import TrainerCallback

import fastdpo
from tests.support import ROOT
from tests.support.trl.dpo import build, tiny_model

PACKAGE = Path(fastdpo.__file__).parent
SECTION = "## The files that a batch crosses"


class Crossed(TrainerCallback):
    """Notes the files of fastdpo whose functions run in the third step. After the first one,
    models have hooks of transformers."""

    def __init__(self):
        self.files: set[str] = set()
        self.is_third = False

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_third = state.global_step == 2

    def on_step_end(self, args, state, control, **kwargs):
        self.is_third = False

    def note(self, frame, event, argument):
        if self.is_third and event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            self.files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))


def test_the_list_is_complete(tmp_path):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), max_steps=3)
        crossed = Crossed()
        trainer.add_callback(crossed)
        sys.setprofile(crossed.note)
        threading.setprofile(crossed.note)
        try:
            trainer.train()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    text = (ROOT / "docs" / "design.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert sorted(re.findall(r"`([\w/]+\.py)`", table)) == sorted(crossed.files)
    assert f"{len(crossed.files)} files" in text
