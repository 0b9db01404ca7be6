"""DPO in a plain PyTorch loop, with packed batches, shared prompts and a fused LM head.

    python examples/dpo_loop.py --model MODEL --dataset PAIRS.jsonl

The pairs have the text columns prompt, chosen and rejected.
"""

import argparse
import itertools

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdpo import attention, metrics, ops, ref_logps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a causal LM with its tokenizer")
parser.add_argument("--dataset", required=True, help="pairs as .jsonl")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
parser.add_argument("--beta", type=float, default=0.1)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
policy = AutoModelForCausalLM.from_pretrained(args.model)


def tokenize(row: dict) -> dict:
    answers = {f"{name}_ids": tokenizer(row[name])["input_ids"] + [tokenizer.eos_token_id] for name in NAMES}
    return {"prompt_ids": tokenizer(row["prompt"])["input_ids"], **answers}


def collate(pairs: list[dict]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids, mask and labels [2B, L]: chosen rows, then rejected rows, padded on the right."""
    rows = [(pair["prompt_ids"], pair[f"{name}_ids"]) for name in NAMES for pair in pairs]
    ids = torch.zeros(len(rows), max(len(p) + len(a) for p, a in rows), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(rows):
        n = len(prompt) + len(answer)
        ids[i, :n], mask[i, :n] = torch.tensor(prompt + answer), 1
        labels[i, len(prompt) : n] = torch.tensor(answer)
    return ids, mask, labels


NAMES = ("chosen", "rejected")
data = Dataset.from_json(args.dataset).map(tokenize)
# Before training, policy and reference are equal: after this pass, no reference model is needed.
data = ref_logps.with_ref_logps(data, ref_logps.precompute(policy, data))

attention.switch(policy)  # only packed attention reads a layout
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
means = metrics.PreferenceMeans()
loader = torch.utils.data.DataLoader(list(data), args.batch_size, shuffle=True, collate_fn=list)
batches = itertools.chain.from_iterable(itertools.repeat(loader))

for pairs in (bar := tqdm(itertools.islice(batches, args.steps), total=args.steps)):
    ids, mask, labels = collate(pairs)
    layout = ops.pack_pairs(ids, mask, labels)
    inputs = attention.packed_inputs(policy, layout, ids)
    hidden = policy.base_model(**inputs).last_hidden_state[0]  # [T, D]
    result = ops.linear_preference_loss(
        hidden[layout.label_index],
        policy.get_output_embeddings().weight,
        layout.labels,
        layout.label_bounds,
        *(torch.tensor([pair[f"ref_{name}_logps"] for pair in pairs]) for name in NAMES),
        objective=ops.PreferenceObjective(beta=args.beta),
    )
    result.loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    means.update_pairs(result.pairs, result.chosen_logps, result.rejected_logps)
    if bar.n % 10 == 9 or bar.n == args.steps - 1:
        logged = means.compute()
        bar.set_postfix({name: f"{logged[name]:.4f}" for name in ("loss", "rewards/margins", "rewards/accuracies")})
