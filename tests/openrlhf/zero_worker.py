"""One rank of a training under DeepSpeed's ZeRO. Usage, under torchrun:
`zero_worker.py OUT STAGE...`.

With each stage of ZeRO trains stock, then patched, from the same initial weights. Writes the logs, the final
weights and the counters of both.
"""

import functools
import inspect
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf_runs import RATE, Recorded, RecordedRewards, Strategy, actor, loader, reward_model, rows, tokenizer

import fastdpo


def engine(model: torch.nn.Module, stage: int, trained: bool):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    options = dict(model=model, config=config, dist_init_required=False)
    if not trained:
        return deepspeed.initialize(**options)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return deepspeed.initialize(**options, optimizer=optimizer)[0]


class ZeroStrategy(Strategy):
    """A strategy that reduces logs in the same way as `DeepspeedStrategy`."""

    world_size = 2

    def is_rank_0(self) -> bool:
        return dist.get_rank() == 0

    def all_reduce(self, data, op="mean"):
        return DeepspeedStrategy.all_reduce(self, data, op)


def counted(reduce, counts: Counter, name: str, *args, **kwargs):
    """Calls `reduce`, and counts the call if OpenRLHF's strategy is the caller."""
    counts[name] += sys._getframe(1).f_code.co_filename == inspect.getsourcefile(DeepspeedStrategy)
    return reduce(*args, **kwargs)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        # Under load DeepSpeed's gather has returned too early. gloo runs the barrier after it.
        dist.barrier()
        return {n: p.detach().clone() for n, p in module.named_parameters()}


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)], lr=RATE), 1.0)


def train_rewards(out: Path, stage: int) -> dict:
    """The logs and final weights of a reward model, and the calls in its training."""
    before = Counter(fastdpo.calls)
    model = engine(reward_model(out / "llama0").float(), stage, trained=True)
    strategy = ZeroStrategy()
    data = loader(strategy, rows(12, seed=dist.get_rank()), is_dpo=False)
    trainer = RecordedRewards(model, strategy, None, data, None, scheduler(), tokenizer(), max_epochs=1)
    trainer.fit(strategy.args)
    return dict(logs=trainer.logs, weights=weights_of(model.module), calls=fastdpo.calls - before)


def train_both(out: Path, stage: int) -> dict:
    """The results of a stock and a patched training, and how often each reduced something over the ranks."""
    rank = dist.get_rank()
    collectives = Counter()
    stock_reduce = dist.all_reduce
    results = {}
    for name in ("stock", "patched"):
        with fastdpo.patched("openrlhf") if name == "patched" else nullcontext():
            before = Counter(fastdpo.calls)
            torch.manual_seed(0)
            models = [actor(out / f"llama{seed}", packing_samples=False) for seed in range(2)]
            models[0].model = engine(models[0].model, stage, trained=True)
            models[1].model = engine(models[1].model, stage if stage == 3 else 0, trained=False)
            strategy = ZeroStrategy()
            data = loader(strategy, rows(12, seed=rank))
            trainer = Recorded(*models, strategy, tokenizer(), None, data, None, scheduler(), beta=0.1, max_epochs=1)

            dist.all_reduce = functools.partial(counted, stock_reduce, collectives, name)
            trainer.fit(strategy.args)
            dist.all_reduce = stock_reduce
            weights = weights_of(models[0].model.module)
            calls = Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()})
            results[name] = dict(logs=trainer.logs, weights=weights, calls=calls, steps=len(trainer.logs))
            results[name]["rewards"] = train_rewards(out, stage)
    return results | dict(collectives=dict(collectives))


def main() -> None:
    out, stages = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    # Use the collectives of gloo, which need no compilation.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    torch.cuda.current_device = lambda: torch.device("cpu")  # where `DeepspeedStrategy` reduces
    torch.save({stage: train_both(out, stage) for stage in stages}, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort while it shuts down


main()
