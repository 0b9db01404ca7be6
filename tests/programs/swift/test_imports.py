"""`patch()` before and after the import of ms-swift, which deletes `__init__` of TRL's trainers."""

import subprocess
import sys
import textwrap

import pytest

PROGRAMS = {
    "not_imported": """
        import fastdpo
        report = fastdpo.patch()
        assert "swift" not in sys.modules
        (seam,) = (seam for seam in report.seams if seam.name == "swift.DPOTrainer")
        assert seam.on and not seam.imported
        try:
            from trl import DPOTrainer
        except RuntimeError:  # TRL 0.28 next to transformers 5, unless ms-swift makes it importable
            sys.exit()
        assert "__init__" in vars(DPOTrainer)
    """,
    "named": """
        import fastdpo
        assert all(seam.on for seam in fastdpo.patch("swift").seams)
    """,
    "imported_after_trl_was_patched": """
        import fastdpo
        fastdpo.patch()
        from swift.rlhf_trainers.dpo_trainer import DPOTrainer
        assert "fastdpo" in DPOTrainer.__init__.__code__.co_filename
        check_deleted(DPOTrainer)
        fastdpo.unpatch()
        check_deleted(DPOTrainer)
    """,
    "imported_before_trl_was_patched": """
        import fastdpo
        from swift.rlhf_trainers.dpo_trainer import DPOTrainer
        assert "swift.DPOTrainer" in {seam.name for seam in fastdpo.patch().seams if seam.on}
        fastdpo.unpatch()
        check_deleted(DPOTrainer)
    """,
}
BEGIN = """
import sys

def check_deleted(trainer):
    \"\"\"TRL's `__init__` must stay deleted: ms-swift's trainers would call it.\"\"\"
    from trl import DPOTrainer
    assert issubclass(trainer, DPOTrainer)
    assert "__init__" not in vars(DPOTrainer)
"""


@pytest.mark.parametrize("program", PROGRAMS)
def test_order_of_imports(program):
    code = BEGIN + textwrap.dedent(PROGRAMS[program])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
