"""The benchmark suites, by name."""

from benchmarks.suites import (
    attention,
    bf16,
    evaluation,
    grpo,
    head,
    host,
    hybrid,
    kto,
    llamafactory,
    loss,
    memory,
    online,
    precompute,
    reward,
    scaling,
    sharing,
    step,
    vision,
)

_MODULES = (
    step,
    hybrid,
    sharing,
    bf16,
    evaluation,
    precompute,
    online,
    kto,
    grpo,
    reward,
    vision,
    llamafactory,
    head,
    loss,
    attention,
    host,
    memory,
    scaling,
)
SUITES = {module.SUITE.name: module.SUITE for module in _MODULES}
