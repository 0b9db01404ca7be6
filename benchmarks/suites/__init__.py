"""The benchmark suites, by name."""

from benchmarks.suites import (
    attention,
    bf16,
    evaluation,
    grpo,
    head,
    kto,
    llamafactory,
    memory,
    online,
    precompute,
    scaling,
    step,
    vision,
)

_MODULES = (
    step,
    bf16,
    evaluation,
    precompute,
    online,
    kto,
    grpo,
    vision,
    llamafactory,
    head,
    attention,
    memory,
    scaling,
)
SUITES = {module.SUITE.name: module.SUITE for module in _MODULES}
