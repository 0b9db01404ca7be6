"""`patch()` without a name imports nothing: trainers that are imported later are patched by their import."""

import textwrap

import pytest

from tests.support.programs.run_command import run
from tests.support.programs.warm import run_program

BEGIN = """
import logging
import sys
import fastdpo
from fastdpo.integrations.trl import kto
from fastdpo.reasons import Reason

def is_patched(trainer):
    return "fastdpo" in trainer.__init__.__code__.co_filename

def seam(name="trl.KTOTrainer"):
    (found,) = (seam for seam in fastdpo.patch().seams if seam.name == name)
    return found

def change():
    kto.KTOLine.unsupported_reason = lambda line: Reason("different-code", difference="as planted")
"""
PROGRAMS = {
    "imported later": """
        assert not seam().imported
        assert "trl.trainer.kto_trainer" not in sys.modules
        from trl import KTOTrainer
        assert is_patched(KTOTrainer) and seam().imported
        fastdpo.unpatch()
        assert not is_patched(KTOTrainer)
    """,
    "named later": """
        fastdpo.patch()
        assert fastdpo.patch("trl.KTOTrainer").seams[0].imported
        from trl import KTOTrainer
        assert is_patched(KTOTrainer)
    """,
    "no longer patched": """
        finders = [*sys.meta_path]
        fastdpo.patch()
        assert sys.meta_path != finders
        fastdpo.unpatch()
        assert sys.meta_path == finders
        from trl import KTOTrainer
        assert not is_patched(KTOTrainer)
    """,
    "imported in a block": """
        with fastdpo.patched():
            from trl import KTOTrainer
            assert is_patched(KTOTrainer)
        assert not is_patched(KTOTrainer)
    """,
    "other options": """
        fastdpo.patch(share_prompts=False)
        try:
            fastdpo.patch("trl.KTOTrainer")
        except fastdpo.PatchError as error:
            assert "trl.KTOTrainer is patched with, share_prompts=False; got share_prompts=True" in str(error)
        from trl import KTOTrainer
        assert is_patched(KTOTrainer)
    """,
    "it differs": """
        fastdpo.patch()
        change()
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
        logging.getLogger("fastdpo").addHandler(handler)
        from trl import KTOTrainer
        assert not is_patched(KTOTrainer)
        ((level, message),) = messages
        assert level == "WARNING" and message.startswith("fastdpo: trl.KTOTrainer (") and "as planted" in message
        assert seam().reason.name == "different-code"
    """,
    "it differs in strict mode": """
        import os
        os.environ["FASTDPO_STRICT"] = "1"
        fastdpo.patch()
        change()
        try:
            from trl import KTOTrainer
        except RuntimeError as error:  # which TRL makes of a `PatchError` in an import
            assert "as planted" in str(error)
        else:
            raise AssertionError
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_that_is_imported_later(name, tmp_path):
    (tmp_path / "program.py").write_text(BEGIN + textwrap.dedent(PROGRAMS[name]))
    done = run_program("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--no-share-prompts",), 0)])
def test_a_program_that_patches_all_before_it_imports_any(options, code, tmp_path):
    """By `fastdpo run`, whose options must be those of the program."""
    program = "import fastdpo\nfastdpo.patch(share_prompts=False)\nimport trl.trainer.kto_trainer\n"
    (tmp_path / "program.py").write_text(program)
    done = run(*options, tmp_path / "program.py", warm=True)
    assert done.returncode == code, done.stderr
    if code:
        assert "options must be those that trl.KTOTrainer is patched with, share_prompts=False" in done.stderr
    else:
        assert done.stderr.count("fastdpo: trl.KTOTrainer (") == 1
