"""Accuracy of LM-head implementations in bfloat16. Writes docs/notes/accuracy.md.

    python -m benchmarks.accuracy [--json OUT] [--quick]

Errors are relative to float64 on the same inputs. Preference losses compare sums of log-probs over
a completion; here a completion has 256 tokens.
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
from benchmarks.sides import workload as w
from benchmarks.sides.heads import PEERS, HeadWorkload, plain_head
from benchmarks.tables import short_commit, wrap
from fastdpo.testing import error

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "accuracy.json", ROOT / "docs" / "notes" / "accuracy.md"
SEQUENCES, TOKENS, V, D = 8, 256, 4000, 256
NOISE = 0.25  # standard deviation of hidden states around a multiple of their target's weight row
REGIMES = {  # that multiple: the larger it is, the more likely the target
    "untrained model": 0.0,
    "trained model": 0.7,
    "confident model": 1.0,
}
PAGE_TEXT = """# Accuracy of LM heads in bfloat16

Errors of bfloat16 LM heads against float64 on the same inputs: {sequences} completions of {tokens} tokens,
vocabulary {v:,}, hidden size {d}. Written by `python -m benchmarks.accuracy`.

- Sum of log-probs: root mean square error of the sum over a completion, in nats. Preference losses
  compare these sums.
- Gradients: relative error with respect to the hidden states, and to the head's weight over one
  completion.

{tables}

## How fastdpo reduces the error

- The target's logit is computed in float32, is never rounded, and is kept out of the sum over the
  vocabulary. This preserves the digits of `1 - p` when p is close to 1.
- Gradient tiles store the unscaled exponentials of the other vocabulary entries, relative to a shift
  at which the target's entry is a power of two.
- Rows are multiplied by the upstream gradient in float32.

{where}
"""


def inputs(strength: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden [S, T, D] and weight [V, D] in bfloat16, and targets [S, T]."""
    generator = torch.Generator().manual_seed(0)
    weight = F.normalize(torch.randn(V, D, generator=generator), dim=1) * 4
    targets = torch.randint(V, (SEQUENCES, TOKENS), generator=generator)
    hidden = strength * weight[targets] + NOISE * torch.randn(SEQUENCES, TOKENS, D, generator=generator)
    device = w.device()
    return hidden.bfloat16().to(device), weight.bfloat16().to(device), targets.to(device)


def run(head: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of a completion, and the gradients of their sum for hidden and weight."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    logps = head(*leaves, targets).logps
    return logps.detach(), *torch.autograd.grad(logps.sum(), leaves)


def measure(quick: bool = False) -> dict[str, Any]:
    """Per regime the mean probability of a target, and the errors of each implementation.

    `quick`: of a few tokens.
    """
    regimes: dict[str, Any] = {}
    for regime, strength in REGIMES.items():
        hidden, weight, targets = inputs(strength)
        if quick:
            hidden, targets = hidden[:2, :8], targets[:2, :8]
        weight64 = weight.double()
        exact_runs = [run(plain_head, h.double(), weight64, y) for h, y in zip(hidden, targets, strict=True)]
        probability = float(torch.cat([logps for logps, *_ in exact_runs]).exp().mean())
        errors: dict[str, Any] = {}
        for name, build in track(PEERS.items(), description=regime):
            try:
                head = build(HeadWorkload(TOKENS, V, D, trainable=True, dtype="bfloat16"))
                runs = [run(head, h, weight, y) for h, y in zip(hidden, targets, strict=True)]
            except Unavailable as reason:
                errors[name] = {"unavailable": str(reason)}
                continue
            differences = [float(a[0].double().sum() - b[0].sum()) for a, b in zip(runs, exact_runs, strict=True)]
            errors[name] = {
                "summed log-probs": float(torch.tensor(differences).square().mean().sqrt()),
                "gradient of hidden states": error(*(torch.stack([x[1] for x in xs]) for xs in (runs, exact_runs))),
                "gradient of the weight": error(runs[0][2], exact_runs[0][2]),
            }
        regimes[regime] = {"probability": probability, "errors": errors}
    return regimes


COLUMNS = {  # a key of the errors: header and format of its column
    "summed log-probs": (f"sum of {TOKENS} log-probs, nats", ".4f"),
    "gradient of hidden states": ("gradient of hidden states", ".1e"),
    "gradient of the weight": ("gradient of the weight", ".1e"),
}


def page(result: dict[str, Any]) -> str:
    """The text of docs/notes/accuracy.md."""
    sections = []
    for regime, measured in result["regimes"].items():
        rows = [
            [name, *(format(errors[key], spec) for key, (_, spec) in COLUMNS.items())]
            for name, errors in measured["errors"].items()
            if "unavailable" not in errors
        ]
        headers = ["", *(header for header, _ in COLUMNS.values())]
        table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
        title = f"{regime.capitalize()} (mean probability of a target: {measured['probability']:.2g})"
        sections.append(f"## {title}\n\n{table}")
    errors = next(iter(result["regimes"].values()))["errors"]
    missing = [f"{name} ({e['unavailable']})" for name, e in errors.items() if "unavailable" in e]
    where = f"{result['machine']}; torch {result['versions']['torch']}; {result['date'][:10]}, "
    where += f"commit {short_commit(result['commit'])}."
    if missing:
        where = wrap(f"Not available on this machine: {'; '.join(missing)}.") + f"\n\n{where}"
    sizes = {"sequences": SEQUENCES, "tokens": TOKENS, "v": V, "d": D}
    return PAGE_TEXT.format(tables="\n\n".join(sections), where=where, **sizes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULT, help="output file")
    parser.add_argument("--quick", action="store_true", help="few tokens, to check that everything runs")
    args = parser.parse_args(argv)
    if args.quick and args.json == RESULT:
        parser.error("--quick must come with another file than that of the documentation")
    host = machine.machine()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": host.get("accelerator") or host["cpu"],
        "versions": machine.versions(*PACKAGES),
        "regimes": measure(args.quick),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if args.json == RESULT:
        PAGE.write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    sys.exit(main())
