"""DPO in a plain PyTorch loop, with packed batches, shared prompts and a fused LM head, on one process or on several.

    python examples/dpo_loop.py --model MODEL --dataset PAIRS.jsonl
    torchrun --nproc-per-node 8 examples/dpo_loop.py --model MODEL --dataset PAIRS.jsonl

The pairs have the text columns prompt, chosen and rejected.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastdpo
from fastdpo import metrics, ops, ref_logps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a causal LM with its tokenizer")
parser.add_argument("--dataset", required=True, help="pairs as .jsonl")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step and process")
parser.add_argument("--beta", type=float, default=0.1)
args = parser.parse_args()

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # those of torchrun
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
if ranks > 1:
    dist.init_process_group()

tokenizer = AutoTokenizer.from_pretrained(args.model)
policy = AutoModelForCausalLM.from_pretrained(args.model).to(device)


def tokenize(row: dict) -> dict:
    answers = {f"{name}_ids": tokenizer(row[name])["input_ids"] + [tokenizer.eos_token_id] for name in NAMES}
    return {"prompt_ids": tokenizer(row["prompt"])["input_ids"], **answers}


def collate(pairs: list[dict]) -> tuple[list, list, torch.Tensor]:
    """Returns the ids and the labels of the chosen rows and then of the rejected ones, and the reference's values."""
    rows = [(pair["prompt_ids"], pair[f"{name}_ids"]) for name in NAMES for pair in pairs]
    references = torch.tensor([[pair[f"ref_{name}_logps"] for pair in pairs] for name in NAMES])
    return [p + a for p, a in rows], [[-100] * len(p) + a for p, a in rows], references


NAMES = ("chosen", "rejected")
data = Dataset.from_json(args.dataset).map(tokenize)
# Before training, policy and reference are equal: after this pass, no reference model is needed.
data = list(ref_logps.with_ref_logps(data, ref_logps.precompute(policy, data)))

fastdpo.prepare(policy)
model = DistributedDataParallel(policy) if ranks > 1 else policy
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
objective, means = ops.PreferenceObjective(beta=args.beta), metrics.PreferenceMeans(device)
sampler = DistributedSampler(data, ranks, rank)
loader = DataLoader(data, args.batch_size, sampler=sampler, collate_fn=collate)
batches = itertools.chain.from_iterable(loader for epoch in itertools.count() if sampler.set_epoch(epoch) is None)

bar = tqdm(itertools.islice(batches, args.steps), total=args.steps, disable=rank > 0)
for step, (ids, labels, references) in enumerate(bar, 1):
    chosen, rejected = fastdpo.score(model, ids, labels=labels).sums().chunk(2)
    loss = ops.preference_loss(chosen, rejected, *references.to(device), objective=objective)
    loss.loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    means.update_pairs(loss, chosen, rejected)
    if step % 10 == 0 or step == args.steps:
        logged = means.compute()  # on every rank
        bar.set_postfix({name: f"{logged[name]:.4f}" for name in ("loss", "rewards/margins", "rewards/accuracies")})

if rank == 0:
    for (name, kind, path), n in sorted(fastdpo.calls.items()):
        print(f"{name}: {n} {path} calls of the {kind} model")
