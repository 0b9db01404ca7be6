"""The time of the host in a DPO step: models of many layers with tiny tensors."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import GRAPHS, LAYERS_COMPILED, STOCK

LAYERS = 24, 36
COMPILED_LAYERS = (24,)
QUICK_LAYERS = (2,)
PAIRS = ((6, 3, 3), (5, 2, 4), (4, 3, 2))  # tokens of prompt, chosen and rejected completion
HEAD_DIM = 64  # as it is on a GPU, where other sizes are padded


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for group, lora, compiled in (("full", False, False), ("LoRA", True, False), ("compiled", False, True)):
        for layers in QUICK_LAYERS if quick else COMPILED_LAYERS if compiled else LAYERS:
            size = ModelSize(layers=layers, hidden=HEAD_DIM, mlp=16, heads=1, kv_heads=1, vocabulary=100)
            work = Workload((PAIRS,), lora=lora, size=size)
            both = [
                (STOCK, {"mode": "stock", "compiled": compiled}),
                (SUBJECT, {"mode": "fastdpo", "compiled": compiled}),
            ]
            if not compiled and (quick or layers in COMPILED_LAYERS):
                both.append((LAYERS_COMPILED, {"mode": "fastdpo", "layers_compiled": True}))
                both.append((GRAPHS, {"mode": "fastdpo", "graphs": True}))
            sides = tuple(Side(name, "benchmarks.sides.host:HostStep", work, options) for name, options in both)
            cases.append(Case(f"{group}/{layers} layers", group, sides))
    return cases


SUITE = Suite(
    name="host",
    title="Time of the host in a training step of TRL's DPOTrainer",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=30,
    descriptions={
        STOCK: "the trainer with its defaults, except that gradient checkpointing is off. Its head takes the path of a "
        "GPU up to its launches, as fastdpo's does.",
        SUBJECT: "the trainer after `fastdpo.patch(compile=False)`. Attention takes the path of a GPU, too, with a "
        "library of flash attention that launches nothing (`benchmarks/sides/host.py`).",
        GRAPHS: "with CUDA graphs. A recording runs the backbone once, and a replay does nothing: what is left is "
        "the time of the host around it.",
        LAYERS_COMPILED: "with `compile=True`. Cases named compiled have the trainer's `torch_compile=True` instead.",
    },
)
