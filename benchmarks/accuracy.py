"""Accuracy of LM-head implementations in bfloat16, for a table of docs/results.md.

    python -m benchmarks.accuracy [--json OUT] [--quick]

Errors are relative to float64 on the same inputs. Preference losses compare sums of log-probs over
a completion; here a completion has 256 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

from benchmarks import machine
from benchmarks.cases import Unavailable
from benchmarks.run import PACKAGES
from benchmarks.sides import workload as w
from benchmarks.sides.heads import PEERS, HeadWorkload, plain_head
from benchmarks.tables import short_commit, wrap
from benchmarks.worker import optional_packages
from fastdpo.accuracy import error

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "accuracy.json"
SEQUENCES, TOKENS, V, D = 8, 256, 4000, 256
NOISE = 0.25  # standard deviation of hidden states around a multiple of their target's weight row
REGIMES = {  # that multiple: the larger it is, the more likely the target
    "untrained model": 0.0,
    "trained model": 0.7,
    "confident model": 1.0,
}


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
                with optional_packages():
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


def table(result: dict[str, Any]) -> str:
    """One row for each head, and a note about what was measured where."""
    regimes = result["regimes"].values()
    errors = next(iter(regimes))["errors"]
    missing = [f"{name} ({e['unavailable']})" for name, e in errors.items() if "unavailable" in e]
    rows = []
    for name in (name for name, e in errors.items() if "unavailable" not in e):
        of_head = [measured["errors"][name] for measured in regimes]
        sums = (f"{e['summed log-probs']:.4f}" for e in of_head)
        rows.append([name, *sums, *(f"{e['gradient of hidden states']:.1e}" for e in of_head)])
    headers = ["", *(f"{regime}, nats" for regime in result["regimes"]), *(f"gradient, {x}" for x in result["regimes"])]
    probabilities = ", ".join(f"{measured['probability']:.2g}" for measured in regimes)
    note = f"The mean probability of a target is {probabilities}. "
    if missing:
        note += f"Not available on this machine: {'; '.join(missing)}. "
    note += f"{result['machine']}; torch {result['versions']['torch']}; {result['date'][:10]}, commit "
    note += f"{short_commit(result['commit'])}."
    return f"{tabulate(rows, headers, tablefmt='github', disable_numparse=True)}\n\n{wrap(note)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULT, help="output file")
    parser.add_argument("--quick", action="store_true", help="few tokens, to check that everything runs")
    args = parser.parse_args(argv)
    if args.quick and args.json == RESULT:
        parser.error("--quick must come with another file than that of the documentation")
    result = machine.origin(*PACKAGES) | {"regimes": measure(args.quick)}
    result["machine"] = result["machine"].get("accelerator") or result["machine"]["cpu"]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(table(result))


if __name__ == "__main__":
    sys.exit(main())
