"""How much the heads of several libraries err in bfloat16, against float64 of the same inputs; makes docs/accuracy.md.

    python -m benchmarks.accuracy [--json OUT]

What preference losses compare are sums of log-probabilities over an answer: here over 256 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

from benchmarks import machine
from benchmarks.cases import Unavailable
from benchmarks.run import PACKAGES, commit
from benchmarks.sides.heads import PEERS, plain
from fastdpo.testing import error

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "accuracy.json", ROOT / "docs" / "accuracy.md"
SEQUENCES, TOKENS, V, D = 8, 256, 4000, 256
NOISE = 0.25  # standard deviation of hidden states around their targets' words
REGIMES = {  # of the target, how far it stands out
    "a model at its start": 0.0,
    "a trained model": 0.7,
    "a confident model": 1.0,
}
PAGE_TEXT = """# Accuracy

Made by `python -m benchmarks.accuracy`: heads in bfloat16 against float64 of the same inputs, {sequences} answers of
{tokens} tokens, {v:,} words, {d} hidden. Sums over an answer's log-probabilities are what preference losses compare;
their error is the root of its mean square, in nats. Errors of gradients are relative: of the hidden states, and of the
head's weight, over one answer.

{tables}

What fastdpo does about it: the target's own logit is taken in float32 and never rounded, and stays out of the sum over
the vocabulary, so that `1 - p` keeps its digits; tiles of the gradient hold the other words' exponentials unscaled,
relative to a shift at which the target's entry is a power of two; the upstream gradient multiplies rows in float32.

{where}
"""


def inputs(strength: float) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [S, T, D], weight [V, D] in bfloat16, targets [S, T]."""
    generator = torch.Generator().manual_seed(0)
    weight = F.normalize(torch.randn(V, D, generator=generator), dim=1) * 4
    targets = torch.randint(V, (SEQUENCES, TOKENS), generator=generator)
    hidden = strength * weight[targets] + NOISE * torch.randn(SEQUENCES, TOKENS, D, generator=generator)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return hidden.bfloat16().to(device), weight.bfloat16().to(device), targets.to(device)


def run(head: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of an answer, and the gradients of their sum."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    logps = head(*leaves, targets)
    return logps.detach(), *torch.autograd.grad(logps.sum(), leaves)


def measure() -> dict[str, Any]:
    """For each regime the mean probability of a target, and each library's errors."""
    found: dict[str, Any] = {}
    for regime, strength in REGIMES.items():
        hidden, weight, targets = inputs(strength)
        wide = weight.double()
        truths = [run(plain, h.double(), wide, y) for h, y in zip(hidden, targets, strict=True)]
        found[regime] = {"probability": float(torch.cat([logps for logps, *_ in truths]).exp().mean()), "errors": {}}
        for name, build in track(PEERS.items(), description=regime):
            try:
                runs = [run(build(), h, weight, y) for h, y in zip(hidden, targets, strict=True)]
            except Unavailable as reason:
                found[regime]["errors"][name] = {"unavailable": str(reason)}
                continue
            off = [float(a[0].double().sum() - b[0].sum()) for a, b in zip(runs, truths, strict=True)]
            found[regime]["errors"][name] = {
                "sum of log-probs": float(torch.tensor(off).square().mean().sqrt()),
                "gradient of hidden": error(*(torch.stack([x[1] for x in xs]) for xs in (runs, truths))),
                "gradient of the head": error(runs[0][2], truths[0][2]),
            }
    return found


def page(result: dict[str, Any]) -> str:
    """docs/accuracy.md"""
    tables = []
    for regime, of_regime in result["regimes"].items():
        rows = [
            [name, f"{e['sum of log-probs']:.4f}", f"{e['gradient of hidden']:.1e}", f"{e['gradient of the head']:.1e}"]
            for name, e in of_regime["errors"].items()
            if "unavailable" not in e
        ]
        headers = ["", "sum of 256 log-probs, nats", "gradient of hidden", "gradient of the head"]
        table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
        tables.append(f"**{regime}** (mean probability of a target: {of_regime['probability']:.2g})\n\n{table}")
    errors = next(iter(result["regimes"].values()))["errors"]
    away = {name: e["unavailable"] for name, e in errors.items() if "unavailable" in e}
    torch_version, day, at = result["versions"]["torch"], result["date"][:10], result["commit"][:7]
    where = f"{result['machine']}; torch {torch_version}; {day}, commit {at}."
    if away:
        where = "Not measured here: " + "; ".join(f"{name} ({why})" for name, why in away.items()) + ".\n\n" + where
    sizes = {"sequences": SEQUENCES, "tokens": TOKENS, "v": V, "d": D}
    texts = {"tables": "\n\n".join(tables), "where": where}
    return PAGE_TEXT.format(**texts, **sizes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULT, help="where to write the errors")
    args = parser.parse_args(argv)
    described = machine.machine()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": described.get("accelerator") or described["cpu"],
        "versions": machine.versions(*PACKAGES),
        "regimes": measure(),
    }
    args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if args.json == RESULT:
        PAGE.write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    sys.exit(main())
