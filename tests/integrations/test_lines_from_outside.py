"""A trainer line that another package defines: the example in docs/trainers.md, for a trainer that
fastdpo does not know.
"""

import functools
import importlib
from contextlib import ExitStack

import pytest

import fastdpo
from fastdpo.commands import doctor
from fastdpo.commands.doctor import OFF, OK
from fastdpo.integrations import lines
from fastdpo.integrations.patching import examine
from tests.support.programs.run_command import run
from tests.support.programs.warm import run_program
from tests.support.stand_ins.toy_package import LINE, TRAINER, batches, installed
from tests.support.trl.dpo import tiny_model

NAME = "toy.PairTrainer"
PROGRAM = """
import torch
from toy.trainer import PairTrainer
from tests.support.trl.dpo import tiny_model

ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.masked_fill(ids < 3, -100))
PairTrainer(tiny_model(), tiny_model(seed=1), [batch]).train()
"""


@pytest.fixture
def install(tmp_path):
    """Installs the toy package, with arguments of `toy_package.installed`, and returns where to."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(installed(tmp_path, *args, **options))


@pytest.mark.parametrize(("version", "reason"), [("2.0", "unsupported-version"), (None, "not-installed")])
def test_another_version_is_off(install, monkeypatch, version, reason):
    monkeypatch.setattr(lines, "registered", {})
    if version is not None:
        install(version)
        importlib.import_module("toy_line")
    else:
        exec(LINE, {})
    (seam,) = examine(NAME).seams
    assert seam.reason.name == reason


def test_an_entry_point_is_found_by_the_command(install):
    """A program of its own is trained fused, and knows nothing of fastdpo."""
    path = install(line=True)
    program = path / "train.py"
    program.write_text(PROGRAM)
    done = run(program, path=(path,), warm=True)
    assert done.returncode == 0, done.stderr
    assert "fastdpo: toy.PairTrainer (1.3): on\n" in done.stderr
    assert "fastdpo: toy.PairTrainer calls: reference fused 1, policy fused 1; 100% of calls fused" in done.stderr


def test_an_entry_point_that_cannot_be_loaded_is_a_warning(install, monkeypatch, caplog):
    path = install(line=True)
    (path / "toy_line.py").write_text("raise RuntimeError('broken')")
    lines.register_entry_points.cache_clear()
    try:
        assert examine("trl.DPOTrainer").seams[0].on
    finally:
        lines.register_entry_points.cache_clear()
    assert "fastdpo: the trainer line toy_line:PairTrainerLine cannot be loaded: broken" in caplog.text


@pytest.mark.parametrize(
    ("attributes", "error", "match"),
    [
        (
            dict(name="toy.PairTrainer", versions=">=1"),
            TypeError,
            "with name, versions and modules",
        ),
        (dict(name="PairTrainer", versions=">=1", modules=("toy",)), ValueError, "must be of the form"),
        (dict(name="toy.PairTrainer", versions="1.0", modules=("toy",)), ValueError, "must be a specifier"),
    ],
)
def test_a_class_that_is_no_line_is_refused(attributes, error, match):
    with pytest.raises(error, match=match):
        fastdpo.register(type("Line", (fastdpo.TrainerLine,), attributes))
    with pytest.raises(TypeError, match="must be a subclass"):
        fastdpo.register("toy.PairTrainer")


@pytest.mark.parametrize(
    ("version", "status", "detail"),
    [
        ("1.3", OK, "1.3: tested"),
        ("2.1", OFF, "2.1: off, this version is not supported: install 'toy>=1.2,<2' [unsupported-version]"),
    ],
)
def test_the_doctor_shows_lines_from_outside(install, version, status, detail):
    install(version, line=True)
    lines.register_entry_points.cache_clear()
    try:
        report = doctor.examine()
    finally:
        lines.register_entry_points.cache_clear()
    assert doctor.Finding(status, "toy", detail) in report["packages"]
    assert {x.name: x.status for x in report["trainers"]}[NAME] == status


def test_the_doctor_shows_a_registered_line_whose_package_is_not_installed(monkeypatch):
    monkeypatch.setattr(lines, "registered", {})
    fastdpo.register(type("Line", (fastdpo.TrainerLine,), dict(name=NAME, versions=">=1.2", modules=("toy",))))
    assert doctor.Finding(OFF, "toy", "not installed") in [*doctor.package_findings()]


def test_a_trainer_that_stores_its_models_elsewhere(install, caplog):
    path = install()
    for name in ("toy/trainer.py", "toy_line.py"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace("self.model", "self.policy").replace("trainer.model", "trainer.policy"))
    importlib.import_module("toy_line")
    from toy.trainer import PairTrainer

    with fastdpo.patched(NAME):
        before = fastdpo.calls.copy()
        trainer = PairTrainer(tiny_model(), tiny_model(seed=1), batches())
        trainer.train()
    assert not hasattr(trainer, "model")
    assert {path for _, _, path in fastdpo.calls - before} == {"fused"}
    assert "not fused" not in caplog.text


REPLACED = {'"toy.PairTrainer"': '"script.PairTrainer"', '">=1.2,<2"': '""', "toy.trainer": "__main__"}
SCRIPT_LINE = functools.reduce(lambda text, x: text.replace(*x), REPLACED.items(), LINE)
SCRIPT = f"""
import fastdpo
{TRAINER}
{SCRIPT_LINE}
print(fastdpo.patch(PairTrainer))
{PROGRAM.replace("from toy.trainer import PairTrainer", "")}
print(fastdpo.calls)
print(fastdpo.patch())
"""


def test_a_class_of_a_script_is_patched(tmp_path):
    """It has no distribution, and so no version."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_program(tmp_path / "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fastdpo: script.PairTrainer: on\n" in done.stdout
    assert "('script.PairTrainer', 'policy', 'fused'): 1" in done.stdout
    assert "script.PairTrainer: on\n" in done.stdout.rpartition("trl.DPOTrainer")[2]


def test_a_line_without_versions_whose_module_is_missing_is_off(monkeypatch):
    monkeypatch.setattr(lines, "registered", {})
    fastdpo.register(type("Line", (fastdpo.TrainerLine,), dict(name="clone.Trainer", versions="", modules=("clone",))))
    (seam,) = examine("clone.Trainer").seams
    assert seam.reason.name == "import-error"
