"""The list of sabotages is complete, and fits the source. `make test-sabotages` applies them."""

import re

import pytest

from fastdpo.integrations.options import PatchOptions
from tests.support import ROOT
from tests.support.sabotages import Sabotage, outcome_of, sabotages

OTHERS = (
    "trainers that bypass the fused call",
    "steps that nothing has cut",
    *("axolotl", "TRL before its rewrite", "TRL from its rewrite to its fused head", "DDP, FSDP2 and ZeRO"),
    "reward models of TRL before its fused head",
    "references of cut steps",
    *("precompute", "metrics", "ops", "kernels", "packing", "prefix tree", "images"),
    "rows that are filled into tensors with room",
    "layers that are checked once for each identity",
    "layers with adapters that are looked for again when one is new",
    "modes that are set when one differs",
    "models that are examined again once they are sharded",
    "settings of the compiler",
    "adapters that are switched as by PEFT",
    "adapters that are activated where others are merged",
    *("adapters that are replaced while they are disabled", "adapters that are set by a list which changes"),
    *("adapters outside of the transformers model", "threads that patch and unpatch at once"),
    *("an error for other options than those in force", "memory_budget"),
    *("hooks of pickled models", "modules that two fused models share"),
    *(
        "hybrid models",
        "LoRA",
        "gradient checkpointing",
        "storage",
        "batches that come with their layouts",
    ),
    *("reward models in commands", "max_tokens for reward models", "rows of a step", "weights of micro-batches"),
    *("max_tokens for SFT", "KL terms of KTO", "weights of a smaller batch", "unpatch within a step"),
    "batches of reward models that come with their layouts",
    *("kernels that batches of other lengths do not compile again", "kernels that run as they were tried"),
    *("pairs that stay together", "metrics of TRL's own batches", "pairs that are dealt to the ranks"),
    "labels outside the mask in a budget of rows",
    "a loss of one's own with a budget of tokens",
    *("functions that an option relies on", "functions of newer versions that are replaced as a whole"),
    *("batches that wait for the end of a step", "optimizers that step in the backward pass"),
    "tokens without sharing",
    "adapters that are disabled are those that PEFT disables",
    *("checkpointing that is disabled for the reference", "models that accelerate unwraps"),
    "readers of a header in several programs",
    *("ZeRO in bfloat16", "use_kernels", "kernels for evaluation only", "mixers whose functions become kernels"),
    *("functions inside modules of the package kernels", "mixers whose forward is a kernel"),
    *("gradients that depend on the batch", "gradients that layers add", "unknown randomness"),
    *("hooks of user code", "hooks of parameters in a probe", "state that a probe changes", "models that keep state"),
    *("models that kept state", "values of buffers", "what attributes hold", "adapters that are merged under graphs"),
    *("entries of the configuration", "scales of lengths", "gradients after a reference"),
    *("policy and reference of equal code", "models that change at each step"),
    *("layers that were compiled before", "what quantized modules keep", "quantized weights that a probe would repack"),
    *("merged calls of a model that falls back", "rows that a dataset makes when they are read"),
    *("layouts of batches that were written to unseen", "unseen writes on a device", "pickled models"),
    *("layouts of the batch that a step is given", "arguments of a call that another trainer has made"),
    *("calls of reward models that fall back", "outputs that a call asks for", "ids outside the embeddings"),
    *("models that change and change back", "softcaps and scales that change"),
    "graphs of all lengths",
    *("graphs", "recordings that do not pay", "what was lost on recordings", "the fastest rank's evidence"),
    *("layers that are compiled in the middle of a step", "compiled layers that are not faster"),
    "memory of recordings after an error",
    "compiled layers in verified calls",
    "backward passes of compiled layers that run again",
    *("second derivatives of one tensor that is several inputs", "second derivatives of replays"),
    "memory of recordings on several devices",
    "recordings that are compared on another batch than they were made of",
    *("activations of another replay", "what a recording has baked in", "a replay that differs"),
    *("a doctor that sees what a script imports", "a report that says which packages are newer than tested"),
    *("metrics that all ranks gather in one dtype", "errors that name the argument that differs"),
    *("models that accelerate has prepared", "models that are wrapped after they were scored"),
    "positions that count padding",
    *("labels that are not shifted", "arguments that cut the logits", "flat rows whose positions begin again"),
    "checkpointing that is enabled again without one more hook",
    *("wrapped models that are scored", "rows of a model that falls back", "labels that are shifted"),
    *("pairs whose rows come in turn", "one order of the values of labels", "positions of padded rows"),
    "losses of other trainers",
    *("tokens that are learned", "tokens that are learned once"),
    "parameters written to modules",
    *("policies that run without gradients", "models that torch.compile has wrapped"),
    "ranks choose alike",
    "the factor of gradients that ranks of a sequence group average",
    *("the order of rows that ranks of a sequence group exchange", "heads that ranks of a sequence group exchange"),
    *("ranks of a sequence group with other rows", "rows that ranks share are counted once"),
)
"""Capabilities that no table of the documentation lists by these names."""

TRAINERS = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "start.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def promises() -> set[str]:
    return {
        f"promise {number}" for number in re.findall(r"^### (\d)\. ", (ROOT / "docs" / "design.md").read_text(), re.M)
    }


def trainers() -> set[str]:
    table = TRAINERS.partition("<!-- trainers:begin -->")[2].partition("<!-- trainers:end -->")[0]
    rows = (re.findall(r"`(\w+)`", line) for line in table.splitlines())
    return {f"{package}.{trainer}" for package, *names in filter(None, rows) for trainer in names}


def commands() -> set[str]:
    return set(re.findall(r"^\| \[`(fastdpo \w+)`\]", COMMANDS, re.M))


def test_each_promise_and_each_capability_has_an_entry():
    assert len(promises()) == 5
    assert len(trainers()) >= 15
    assert len(commands()) == 3
    options = {*PatchOptions._fields}
    assert {sabotage.name for sabotage in sabotages()} == promises() | trainers() | commands() | options | {*OTHERS}


@pytest.mark.parametrize("sabotage", sabotages(), ids=lambda sabotage: sabotage.name)
def test_an_entry_fits_the_source(sabotage):
    source = (ROOT / sabotage.file).read_text()
    assert source.count(sabotage.old) == 1
    changed = source.replace(sabotage.old, sabotage.new)
    assert compile(changed, sabotage.file, "exec")
    assert changed != source
    assert (ROOT / sabotage.tests.split()[0]).exists()
    assert re.search(rf"^{re.escape(sabotage.target)}\b.*:", MAKEFILE, re.M) or sabotage.target.startswith("test-trl-")


OPTION = "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')\n"


@pytest.mark.parametrize(
    ("new", "tests", "noticed"),
    [
        ("x - 1", "test_sum.py", True),
        ("1 + x", "test_sum.py", False),
        ("x - 1", "test_sum.py -k no_such_test", False),
    ],
    ids=["wrong", "equal", "without a test"],
)
def test_a_change_is_noticed_if_a_test_fails(new, tests, noticed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    (tmp_path / "conftest.py").write_text(OPTION)
    (tmp_path / "sums.py").write_text("def successor(x): return x + 1\n")
    (tmp_path / "test_sum.py").write_text("from sums import successor\ndef test(): assert successor(2) == 3\n")
    assert outcome_of(Sabotage("sum", "sums.py", "x + 1", new, tests), tmp_path).noticed == noticed
