"""Builds a small Llama and a byte-level BPE tokenizer from the text of the pairs.

    python -m benchmarks.demo.model --dataset PATH --out DIR

The model is trained for one epoch on every prompt with both of its completions, so that DPO starts
from a model of the text.
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from fastdpo.commands.check.tiny import train_tokenizer
from fastdpo.data.files import load_preferences

COLUMNS = ("prompt", "chosen", "rejected")
VOCABULARY = 8192
BLOCK = 128
ROWS = 8
EPOCHS = 1
LEARNING_RATE = 2e-3


def build_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialized Llama with 4 layers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def blocks_of(rows: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Concatenates the rows, each with an end token, and splits them: [blocks, BLOCK]."""
    ids = [token for row in tokenizer(rows)["input_ids"] for token in (*row, tokenizer.eos_token_id)]
    return torch.tensor(ids[: len(ids) // BLOCK * BLOCK]).view(-1, BLOCK)


def train(model: LlamaForCausalLM, blocks: torch.Tensor) -> None:
    """Next-token training with AdamW and a one-cycle schedule."""
    batches = [batch for _ in range(EPOCHS) for batch in blocks[torch.randperm(len(blocks))].split(ROWS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=len(batches))
    model.train()
    with tqdm(batches, desc="language model", file=sys.stdout, mininterval=0.5, dynamic_ncols=True) as bar:
        for batch in bar:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the tokenizer and the model of the demo.")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    set_seed(0)
    pairs = load_preferences(args.dataset, required=COLUMNS).to_list()
    if not isinstance(pairs[0]["prompt"], str):
        raise ValueError("--dataset must contain plain text to build a model from; got conversations: pass --model")
    tokenizer = train_tokenizer([pair[name] for pair in pairs for name in COLUMNS], VOCABULARY)
    model = build_llama(tokenizer)
    rows = [pair["prompt"] + pair[completion] for pair in pairs for completion in ("chosen", "rejected")]
    train(model, blocks_of(rows, tokenizer))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
