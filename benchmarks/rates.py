"""Tokens a second, model FLOPs and the share of a device's peak, from the workload that a result names."""

from __future__ import annotations

from statistics import median
from typing import Any

Record = dict[str, Any]
Row = tuple[int, int]
"""Tokens of a prompt and of a completion."""

RANK = 16  # of the adapters of `benchmarks.sides.workload.lora_config`
BYTES = {"float32": 4, "bfloat16": 2, "nf4": 4.127 / 8}  # of a weight; in nf4 with its part of the quantized scales
HOPPER = {"bfloat16": 989e12, "float32": 67e12}
PEAKS = {
    "NVIDIA H200": HOPPER,
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA A100": {"bfloat16": 312e12, "float32": 19.5e12},
}
"""FLOP/s of dense matrix products, by the beginning of a device's name: NVIDIA's data sheets, without sparsity and, in
float32, without TF32, which torch does not use by default.
"""


def passes(trainer: str, workload: Record, batch: int) -> tuple[list[Row], list[Row], list[Row]]:
    """The rows of a batch, those with a backward pass, and those without, as often as models score them.

    Args:
        trainer: in lower case, or a suite of `DPOTrainer`.
        workload: of the JSON.
        batch: index of the batch.
    """
    drawn, n, longest = workload["batches"][batch], workload.get("pairs_of_prompt", 1), workload["max_length"]
    images = workload.get("images", 0) * (1 + (workload.get("side", 0) // 32) ** 2)  # each after a token
    prompts = [(min(drawn[i - i % n][0] + images, longest), *completions) for i, (_, *completions) in enumerate(drawn)]
    prompts = [x for first in range(n) for x in prompts[first::n]]  # in the order of `AccumulatedWorkload.examples`
    rows = [(prompt, min(x, longest - prompt)) for prompt, *completions in prompts for x in completions]
    chosen = [(prompt, min(x, longest - prompt)) for prompt, x, *_ in prompts]
    borrowed = [(prompt, min(prompts[i - 1][1], longest - prompt)) for i, (prompt, *_) in enumerate(prompts)]
    of_trainers = {
        # Policy and reference score the KL term, of the completion of the prompt before.
        "kto": (chosen, chosen, chosen + borrowed + borrowed),
        "rloo": (rows, rows, rows + rows),  # by the old policy, too
        "reward": (rows, rows, []),
    }
    return of_trainers.get(trainer, (rows, rows, rows))


def weights(workload: Record) -> tuple[int, int, int]:
    """The number of weights of a Llama: of its layers, of their LoRA adapters, and of its head."""
    size = workload["size"]
    hidden, mlp, key = size["hidden"], size["mlp"], size["kv_heads"] * (size["hidden"] // size["heads"])
    shapes = [(hidden, hidden), (hidden, key), (hidden, key), (hidden, hidden), *[(hidden, mlp)] * 3]
    of_adapters = size["layers"] * RANK * sum(a + b for a, b in shapes) if workload["lora"] else 0
    return size["layers"] * sum(a * b for a, b in shapes), of_adapters, hidden * size["vocabulary"]


def model_flops(workload: Record, trained: list[Row], scored: list[Row], has_vocabulary: bool = True) -> float:
    """FLOPs that a Llama needs for the rows of a step as they are, each by itself.

    This is the numerator of model FLOPs utilization (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with
    Pathways", appendix B): 2 FLOPs a token and weight in a forward pass and 4 in its backward, so 6 N, and
    12 L H Q T a token for the attention of L layers with H heads of size Q over T tokens, not halved for causality.
    Padding, shared prompts and activations that checkpointing computes again change nothing. Other than there:

    - The head is counted for the tokens of completions only, which are all that is scored.
    - A pass without gradients, such as the reference's, takes a third, 2 N and 4 L H Q T, and has no adapters.
    - Frozen weights (LoRA) have no gradient of their own: 4 N instead of 6 N. Adapters are trained, with 6 N.

    Args:
        workload: of the JSON.
        trained, scored: the rows with and without a backward pass.
        has_vocabulary: False for a reward model, whose head has one label.
    """
    of_layers, of_adapters, of_head = weights(workload)

    def forward(rows: list[Row]) -> tuple[int, int, int]:
        """Of the weights of the model, of attention, and of adapters."""
        tokens, scores, squares = sum(map(sum, rows)), sum(x for _, x in rows), sum(sum(row) ** 2 for row in rows)
        of_attention = 4 * workload["size"]["layers"] * workload["size"]["hidden"] * squares
        return 2 * (of_layers * tokens + has_vocabulary * of_head * scores), of_attention, 2 * of_adapters * tokens

    of_model, *others = forward(trained)
    return (2 if workload["lora"] else 3) * of_model + 3 * sum(others) + sum(forward(scored)[:2])


def work(suite: str, workload: Record, steps: int = 1, batch: int | None = None) -> Record:
    """Real tokens of a step and, for a Llama, its model FLOPs and the bytes of the weights. Empty for no step.

    Args:
        suite: name of the suite.
        workload: of the JSON.
        steps: number of steps that its batches, or the one that is given, make up.
        batch: the one that is measured; None for all.
    """
    batches = range(len(workload.get("batches", ()))) if batch is None else [batch]
    trainer = (workload.get("trainer") or suite).lower()
    of_batches = [passes(trainer, workload, i) for i in batches]
    tokens = sum(sum(map(sum, rows)) for rows, *_ in of_batches) / steps
    if not of_batches or workload["architecture"] != "Llama" or "family" in workload:
        return {"tokens": tokens} if of_batches else {}
    has_vocabulary, size, width = trainer != "reward", workload["size"], BYTES[workload["weights"]]
    flops = sum(model_flops(workload, *rows, has_vocabulary) for _, *rows in of_batches) / steps
    of_layers, of_adapters, of_head = weights(workload)
    rest = of_adapters + of_head * (1 + has_vocabulary) + size["hidden"] * (2 * size["layers"] + 1)
    held = of_layers * (BYTES["nf4"] if workload.get("quantized") else width) + rest * width
    models = 1 if workload["lora"] or not of_batches[0][2] else 2
    return {"tokens": tokens, "model_flops": flops, "weights_bytes": round(models * held)}


def rates(result: Record, case: Record, seconds: dict[str, float], steps: int = 1) -> Record:
    """The work of a step, and by side its real tokens a second and its model FLOPs utilization.

    The latter has no sides where the peak of the device, or the FLOPs, are not known.

    Args:
        result: of a run.
        case: one of it.
        seconds: of a step, by side.
        steps: see `work`.
    """
    workload, device = case.get("workload", {}), result["machine"].get("accelerator") or ""
    if not (of_step := work(result["suite"], workload, steps, case.get("batch"))):
        return {}
    known = next((peaks for name, peaks in PEAKS.items() if device.startswith(name) and "model_flops" in of_step), {})
    peak = known.get("bfloat16" if workload["bf16"] else workload["weights"])
    of_time = {name: of_step["tokens"] / x for name, x in seconds.items()}
    of_peak = {name: of_step["model_flops"] / x / peak for name, x in seconds.items()} if peak else {}
    return {"work": of_step, "tokens_per_second": of_time, "utilization": of_peak}


def of_trainings(result: Record) -> Record:
    """`rates` of the steps of trainings after the first. The second batch of the workload holds the pairs of all."""
    seconds = {name: median(side["step_seconds"][1:]) for name, side in result["sides"].items()}
    return rates(result | {"suite": "step"}, result | {"batch": 1}, seconds, result["steps"])
