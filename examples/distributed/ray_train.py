"""DPO with TRL under Ray Train, on a machine or a cluster of Ray.

    python examples/distributed/ray_train.py --workers 8 --model MODEL --dataset PAIRS.jsonl

Further options are those of train.py. Files must be readable on every machine.
"""

import argparse
import os
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workers", type=int, default=2, help="processes, one per GPU where there are GPUs")
args, options = parser.parse_known_args()


def work(options: list[str]) -> None:
    from train import parse, train  # imported in the worker, which patches it

    train(parse(options))


ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
TorchTrainer(
    work,
    train_loop_config=options,
    scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
    run_config=RunConfig(name="fastdpo", storage_path=os.path.abspath("out/ray")),
).fit()
