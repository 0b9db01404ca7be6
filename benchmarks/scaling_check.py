"""Steps of TRL under FSDP2 on gloo ranks of this machine, next to the terms of `scaling_model`.

    python -m benchmarks.scaling_check [--json FILE] [--quick]

1, 2 and 4 ranks with one thread each run steps of TRL's `DPOTrainer`, stock and patched, at lengths
that are drawn for each rank. Steps of one rank, of which each core runs one at the same time, give
the rate of each side. Collectives of the sizes of the model's units give the rates of gloo. From
these, the terms of the model predict the steps of 2 and 4 ranks, with two changes: collectives do
not run during compute, and ranks without a core of their own share the cores.

The elements of gathers and reductions of a step are counted where they are dispatched.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import scaling_model as m
from benchmarks.machine import machine, versions
from benchmarks.sides import workload as w
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import BOUNDS, PROFILES, SPREAD

RESULTS = m.RESULTS / "scaling_check.json"
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.sides.trainer"])
CORES = 2
RANKS = 1, 2, 4
SIDES = "stock", "patched"
PAIRS, BATCHES, ROUNDS = 2, 2, 3
SIZE = ModelSize(vocabulary=8_000)
QUICK_SIZE = ModelSize(layers=2, hidden=32, mlp=64, heads=4, kv_heads=2, vocabulary=512)
SMALL = 512  # elements of the largest collective of a trainer's metrics


class CollectiveCounter(TorchDispatchMode):
    """Counts the elements of whole tensors: those that gathers return, and that reductions take.

    Attributes:
        elements: by "gathered" and "reduced".
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and ("gather" in name or "reduce_scatter" in name):
            largest = max(x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            self.elements["gathered" if "gather" in name else "reduced"] += largest * (largest > SMALL)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Launch:
    """Ranks that train together.

    Attributes:
        ranks: number of processes.
        side: "stock" or "patched".
        size: of the model.
        rounds: of timed steps over all batches.
    """

    ranks: int
    side: str
    size: ModelSize = SIZE
    rounds: int = ROUNDS


def lengths(rank: int, batch: int) -> tuple[w.Lengths, ...]:
    return w.draw_lengths(*PROFILES[m.DATASET], PAIRS, rank * BATCHES + batch, spread=SPREAD, bounds=BOUNDS)


def shard(model: Any) -> None:
    """Applies FSDP2 to the units that accelerate makes."""
    for unit in (*model.model.layers, model.model.embed_tokens):
        fully_shard(unit)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = monotonic()
    work()
    dist.barrier()
    return monotonic() - start


def gloo_seconds(size: ModelSize, rounds: int) -> dict[str, list[float]]:
    """Seconds of a gather and of a reduction of each unit of a model in float32."""
    ranks = dist.get_world_size()
    found = {"gather": [], "reduce": []}
    for unit in m.Model.of_size(size).units:
        part = torch.ones(-(-unit // ranks))
        whole = torch.ones(ranks * len(part))
        ops = {
            "gather": lambda whole=whole, part=part: dist.all_gather_single(whole, part),
            "reduce": lambda whole=whole, part=part: dist.reduce_scatter_single(part, whole),
        }
        for name, op in ops.items():
            op()
            found[name].append(median(timed(op) for _ in range(rounds)))
    return found


def run_rank(launch: Launch, rank: int, port: int, file: Path) -> None:
    """Trains one rank, and writes its seconds, by rounds and batches, and its counts to a file."""
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=launch.ranks, LOCAL_WORLD_SIZE=launch.ranks)
    os.environ.update({name: str(x) for name, x in (names | dict(MASTER_ADDR="localhost", MASTER_PORT=port)).items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    import fastdpo
    from benchmarks.sides.trainer import build_trainer

    work = Workload(tuple(lengths(rank, i) for i in range(BATCHES)), size=launch.size, checkpointing=True)
    if launch.side == "patched":
        os.environ["FASTDPO_STRICT"] = "1"
        fastdpo.patch("trl.DPOTrainer", reference_memory=False)
    trainer: Any = build_trainer(work, file.with_suffix(".trainer"), "sdpa")
    for model in (trainer.model, trainer.ref_model):
        shard(model)
    batches = [trainer.data_collator(w.examples(work, i)) for i in range(BATCHES)]

    def step(batch: int) -> None:
        trainer.training_step(trainer.model, dict(batches[batch]))
        trainer.model.zero_grad(set_to_none=True)

    step(0)
    with CollectiveCounter() as counter:
        step(0)
    seconds = [[timed(lambda batch=batch: step(batch)) for batch in range(BATCHES)] for _ in range(launch.rounds)]
    gloo = gloo_seconds(launch.size, launch.rounds)
    found = {"seconds": seconds, "elements": dict(counter.elements), "gloo": gloo}
    file.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo may abort while it shuts down


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def measure(launch: Launch, seconds: float = 280) -> dict[str, Any]:
    """Runs a launch, one for each core if it has a single rank. Returns what its first rank wrote.

    Raises:
        RuntimeError: a rank failed or did not end in time.
    """
    copies = CORES if launch.ranks == 1 else 1
    with TemporaryDirectory() as directory:
        files = [[Path(directory) / f"{copy}-{rank}.json" for rank in range(launch.ranks)] for copy in range(copies)]
        ports = [free_port() for _ in files]
        arguments = [
            (launch, rank, port, file)
            for port, of_copy in zip(ports, files, strict=True)
            for rank, file in enumerate(of_copy)
        ]
        processes = [PROCESSES.Process(target=run_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        end = monotonic() + seconds
        for process in processes:
            process.join(max(0.0, end - monotonic()))
            process.kill()
        if not all(file.exists() for of_copy in files for file in of_copy):
            raise RuntimeError(f"a rank of {launch} failed or did not end within {seconds:.0f} s")
        return json.loads(files[0][0].read_text())


def operations(side: str, size: ModelSize, ranks: int) -> np.ndarray:
    """Operations of a forward on each rank, float64 [batches, ranks]. On a CPU, TRL scores every position."""
    cost = m.Model.of_size(size).cost
    found = np.zeros((BATCHES, ranks))
    for batch in range(BATCHES):
        for rank in range(ranks):
            pairs = m.lengths_of(lengths(rank, batch))
            whole = m.padded_costs(cost, pairs, 1, labelled=False) if side == "stock" else cost.costs(pairs)
            found[batch, rank] = whole.sum()
    return found


def medians(found: dict[str, Any]) -> np.ndarray:
    """The median seconds of each batch over the rounds, float64 [batches]."""
    return np.median(found["seconds"], 0)


def predicted(launch: Launch, alone: dict[str, Any], found: dict[str, Any]) -> np.ndarray:
    """The seconds of each batch, float64 [batches].

    Args:
        launch: of several ranks.
        alone: what one rank measured.
        found: what the launch measured, of which only the rates of gloo are used.
    """
    rate = 5 * operations(launch.side, launch.size, 1).sum() / medians(alone).sum()
    of_ranks = 5 * operations(launch.side, launch.size, launch.ranks) / rate
    slowest = np.maximum(of_ranks.max(1), of_ranks.sum(1) / CORES)
    gather, reduce = (found["gloo"][name] for name in ("gather", "reduce"))
    gathers = sum(gather) + 2 * sum(gather[:-1])  # the head stays gathered after a forward
    phases = [m.Phase(mean, most, gathers + sum(reduce)) for mean, most in zip(of_ranks.mean(1), slowest, strict=True)]
    return np.array([m.step_of([phase], overlap=False).total for phase in phases])


def elements(size: ModelSize) -> dict[str, int]:
    """The elements that the model of FSDP2 predicts, by "gathered" and "reduced"."""
    amounts = m.traffic(m.Model.of_size(size), m.ENGINES["FSDP2"])
    gathered = amounts.forward + amounts.reference + amounts.backward
    return {"gathered": sum(gathered), "reduced": sum(amounts.reduced)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that everything runs")
    args = parser.parse_args()
    size = QUICK_SIZE if args.quick else SIZE
    launches = [Launch(ranks, side, size, 1 if args.quick else ROUNDS) for side in SIDES for ranks in RANKS]
    found = [asdict(launch) | measure(launch) for launch in launches]
    packages = versions("torch", "transformers", "trl", "accelerate")
    result = {"quick": args.quick, "machine": machine(), "versions": packages, "launches": found}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Predicted and measured steps, and the elements of collectives."""
    from tabulate import tabulate

    rows = []
    for found in result["launches"]:
        launch = Launch(found["ranks"], found["side"], ModelSize(**found["size"]))
        measured = medians(found)
        if launch.ranks == 1:
            rows.append([launch.side, 1, "", f"{measured.mean():.2f}", "", ""])
            alone = found
            continue
        guess = predicted(launch, alone, found)
        error = guess.mean() / measured.mean() - 1
        counted = found["elements"] == elements(launch.size)
        times = f"{guess.mean():.2f}", f"{measured.mean():.2f}", f"{error:+.0%}"
        rows.append([launch.side, launch.ranks, *times, "equal" if counted else f"{found['elements']}"])
    headers = ["side", "ranks", "predicted, s", "measured, s", "error", "elements of collectives"]
    return tabulate(rows, headers, "github", colalign=("left", *["right"] * 4, "left"), disable_numparse=True)


if __name__ == "__main__":
    main()
