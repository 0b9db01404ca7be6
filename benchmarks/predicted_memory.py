"""Predicted and measured peak memory of DPO steps in TRL, for docs/memory.md.

Usage: python -m benchmarks.predicted_memory [--json FILE] [--page] [--quick]

Each case trains in a process of its own, stock and patched, for a few steps. The peak is that of the
process's resident set during forward and backward, above what it held when the trainer had been
created. It contains the states of the optimizer from the second step on. On a GPU, other cases are trained, of a model
of the size of Qwen2.5-0.5B in bfloat16, and the peak is that of `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "predicted_memory.json", ROOT / "docs" / "memory.md"
GPU_RESULTS = Path("out/gpu/predicted_memory.json")
BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"
STEPS = 2
SEED = 0
PAIR, GPU_PAIR = (96, 48, 48), (384, 192, 192)
VOCABULARY = 32_768
SIZE = dict(layers=4, hidden=256, mlp=768, heads=4, kv_heads=2, vocabulary=VOCABULARY)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=384, output_router_logits=True),
}
"""Model types, and the entries of their configurations that not all of them share."""
HYBRID = ("Qwen3.5", "Falcon-H1", "LFM2")
"""Names of `benchmarks.sides.workload.ARCHITECTURES`."""


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        family: one of `FAMILIES` or `HYBRID`.
        pairs: of each batch.
        lora, checkpointing, bf16, precomputed, accumulates: as in `fastdpo.commands.estimate.simulation.Setup`.
        ragged: whether pairs have different lengths, so that batches are padded.
        rewards: whether RewardTrainer trains a reward model.
    """

    family: str = "llama"
    pairs: int = 8
    lora: bool = False
    checkpointing: bool = False
    bf16: bool = False
    precomputed: bool = False
    accumulates: bool = False
    ragged: bool = False
    rewards: bool = False

    @property
    def lengths(self) -> list[tuple[int, int, int]]:
        """Tokens of the prompt and of the completions of each pair."""
        factors = [1 + (i % 4) / 2 for i in range(self.pairs)] if self.ragged else [1] * self.pairs
        return [tuple(int(n * factor) for n in (GPU_PAIR if on_gpu() else PAIR)) for factor in factors]

    def config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        from benchmarks.sides.workload import ARCHITECTURES, ModelSize, Workload, decoder_entries
        from benchmarks.suites.step import GPU_SIZE

        size = GPU_SIZE if on_gpu() else ModelSize(**SIZE)
        shared = decoder_entries(Workload((), size=size, max_length=1024)) | {"num_labels": 1 if self.rewards else 2}
        if self.family in HYBRID:
            kind, entries = ARCHITECTURES[self.family]
            return AutoConfig.for_model(kind, **shared, **entries(size))
        return AutoConfig.for_model(self.family, **shared | FAMILIES[self.family])


CASES = (
    *(Case(pairs=n) for n in (2, 8, 24)),
    Case(ragged=True),
    Case(bf16=True),
    Case(accumulates=True),
    Case(precomputed=True),
    *(Case(checkpointing=True, pairs=n) for n in (8, 24)),
    *(Case(lora=True, pairs=n) for n in (8, 24)),
    Case(lora=True, checkpointing=True, bf16=True, pairs=24),
    *(Case(family, pairs=n) for family in ("gemma2", "qwen3_moe") for n in (4, 12)),
    *(Case(family, lora=True, checkpointing=True, pairs=12) for family in ("gemma2", "qwen3_moe")),
    *(Case(family, pairs=4) for family in HYBRID),
    *(Case(family, checkpointing=True, pairs=12) for family in HYBRID),
)
GPU_CASES = (
    Case(bf16=True),
    Case(bf16=True, ragged=True, checkpointing=True),
    Case(bf16=True, precomputed=True, pairs=24, checkpointing=True),
    Case(bf16=True, lora=True),
    Case(bf16=True, lora=True, checkpointing=True, pairs=24),
    Case(bf16=True, rewards=True),
)
LORA = dict(r=16, lora_alpha=32, target_modules="all-linear")


class Comparison(NamedTuple):
    """Bytes above the models.

    Attributes:
        predicted: by `fastdpo estimate`.
        measured: the resident set.
    """

    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def examples(case: Case, batches: int = 1) -> list[dict[str, Any]]:
    """Pairs of random tokens. No two are equal, since fastdpo computes equal rows of a batch once."""
    import torch

    generator = torch.Generator().manual_seed(SEED)

    def ids(n: int) -> list[int]:
        return torch.randint(5, VOCABULARY, (n,), generator=generator).tolist()

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{name: ids(n) for name, n in zip(names, lengths, strict=True)} for lengths in case.lengths * batches]


def predict(case: Case, patched: bool) -> int:
    import torch

    from fastdpo.commands.estimate.simulation import Setup, simulate
    from fastdpo.ops.devices import memory_of
    from fastdpo.ref_logps.pairs import Pairs

    device = torch.device("cuda" if on_gpu() else "cpu")
    rows = examples(case)
    setup = Setup(
        case.config(),
        device=device.type,
        device_memory=memory_of(device),
        dtype=torch.bfloat16 if on_gpu() else torch.float32,
        autocast=case.bf16,
        lora=LORA if case.lora else None,
        precomputed_reference=case.precomputed,
        checkpointing=case.checkpointing,
        accumulates=case.accumulates,
        rewards=case.rewards,
    )
    batch = Pairs(rows).collate(rows)
    if case.rewards:
        del batch["labels"]
    memory = simulate(setup, batch, patched=patched)
    return memory.optimizer + memory.step


def measure(case: Case, patched: bool) -> int:
    """Trains in this process."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
    from trl import DPOConfig, RewardConfig, RewardTrainer

    import fastdpo
    from benchmarks.peak import PeakAboveBaseline
    from benchmarks.sides.trainer import TokenizedTrainer, build_tokenizer

    class Watch(TrainerCallback):
        """Forward and backward of each step."""

        def __init__(self) -> None:
            self.peaks: list[int] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.meter = PeakAboveBaseline()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.step = ExitStack()
            self.step.enter_context(self.meter.watched())

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.step.close()
            self.peaks.append(self.meter.bytes)

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification if case.rewards else AutoModelForCausalLM
        return kind.from_config(case.config(), dtype=torch.bfloat16 if on_gpu() else torch.float32)

    def rows(n: int) -> list[dict[str, Any]]:
        """Those of RewardTrainer begin with their prompts."""
        pairs = examples(case, n)
        names = ("chosen_ids", "rejected_ids")
        return [{x: pair["prompt_ids"] + pair[x] for x in names} for pair in pairs] if case.rewards else pairs

    watch, trained = Watch(), "trl.RewardTrainer" if case.rewards else "trl.DPOTrainer"
    trainer_class, config_class = (RewardTrainer, RewardConfig) if case.rewards else (TokenizedTrainer, DPOConfig)
    only_dpo: dict[str, Any] = {"precompute_ref_log_probs": case.precomputed}
    reference: dict[str, Any] = {"ref_model": None if case.lora or case.precomputed or case.rewards else model(1)}
    with TemporaryDirectory() as directory, fastdpo.patched(trained) if patched else nullcontext():
        trainer: Any = trainer_class(
            model=model(0),
            **({} if case.rewards else reference),
            args=config_class(
                output_dir=directory,
                per_device_train_batch_size=case.pairs,
                max_length=None,
                max_steps=STEPS,
                bf16=case.bf16,
                gradient_checkpointing=case.checkpointing,
                gradient_accumulation_steps=1 + case.accumulates,
                **({} if case.rewards else only_dpo),
                use_cpu=not on_gpu(),
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows(STEPS * (1 + case.accumulates))),
            processing_class=build_tokenizer(),
            peft_config=LoraConfig(task_type="SEQ_CLS" if case.rewards else "CAUSAL_LM", **LORA) if case.lora else None,
            callbacks=[watch],
        )
        trainer.train()
    return max(watch.peaks[1:])


def compare(case: Case, patched: bool) -> Comparison:
    predicted = predict(case, patched)
    gc.collect()
    gc.freeze()  # each step collects garbage, which takes longer than the step among all that is imported
    return Comparison(predicted, measure(case, patched))


def compare_in_new_process(*sides: tuple[Case, bool]) -> list[Comparison]:
    """Compares cases, stock or patched, one after the other in one process."""
    # glibc gives large blocks back to the system only while its threshold for them is fixed.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.starmap(compare, sides)


def main(argv: list[str] | None = None) -> None:
    from tqdm import tqdm

    from benchmarks import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results_file = GPU_RESULTS if on_gpu() else RESULTS
    parser.add_argument("--json", type=Path, default=results_file, help="the file of results, which is continued")
    parser.add_argument("--page", action="store_true", help="write the table of docs/memory.md, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="one case only, to check that everything runs")
    args = parser.parse_args(argv)
    if args.quick and args.json == RESULTS:
        parser.error("--quick must come with another file than that of the documentation")
    results = json.loads(args.json.read_text()) if args.json.exists() else []
    if args.page:
        PAGE.write_text(with_table(PAGE.read_text(), results))
        return
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.machine() | {"bfloat16": machine.bfloat16()},
    }
    cases = GPU_CASES if on_gpu() else CASES
    sides = [asdict(case) | {"patched": patched} for case in cases for patched in (False, True)]
    sides = sides[:2] if args.quick else sides
    known = [{name: result[name] for name in sides[0]} for result in results]
    for side in tqdm([side for side in sides if side not in known]):
        case = Case(**{name: value for name, value in side.items() if name != "patched"})
        (found,) = compare_in_new_process((case, side["patched"]))
        results.append(side | found._asdict() | origin)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def with_table(page: str, results: list[dict[str, Any]]) -> str:
    """A page with the table of the results between its markers, and where they were measured."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(results)}\n\n{where(results)}\n\n{END}{rest.split(END)[1]}"


def where(results: list[dict[str, Any]]) -> str:
    """The machines, dates and commits of results."""
    from benchmarks.tables import machine_of, short_commit, wrap

    places = [f"{machine_of(x)}; {x['date'][:10]}, commit {short_commit(x['commit'])}" for x in results]
    return wrap(f"Measured on: {'; '.join(dict.fromkeys(places))}.")


def markdown(results: list[dict[str, Any]]) -> str:
    """The table of docs/memory.md."""
    from tabulate import tabulate

    flags = ("ragged", "lora", "checkpointing", "bf16", "precomputed", "accumulates")
    rows = []
    for case in CASES:
        names = ", ".join(filter(None, [case.family, *(flag for flag in flags if getattr(case, flag))]))
        row: list[Any] = [names, case.pairs]
        for patched in (False, True):
            side = asdict(case) | {"patched": patched}
            (result,) = (x for x in results if side.items() <= x.items())
            found = Comparison(result["predicted"], result["measured"])
            row += [*(f"{x / 2**20:,.0f}" for x in found), f"{found.error:+.0%}"]
        rows.append(row)
    headers = [
        "training",
        "pairs",
        *("stock: predicted", "measured", "error"),
        *("patched: predicted", "measured", "error"),
    ]
    return tabulate(rows, headers, "github", colalign=("left", *["right"] * 7))


if __name__ == "__main__":
    main()
