"""A model, a tokenizer and preference pairs that are built in place, for `fastdpo check --tiny`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<|pad|>", "<|eos|>"
WORDS = [start + end for start in "bdfghklmnprstvw" for end in ("a", "e", "i", "o", "u", "an", "el", "or")]


def build(directory: Path, pairs: int, rewards: bool = False) -> tuple[Path, Path]:
    """Writes a Llama with 2 layers and random weights, its tokenizer, and pairs of random words.

    Args:
        directory: for the files.
        pairs: their number.
        rewards: whether the model is a reward model.

    Returns:
        The directory of the model, and the file of the pairs.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    rows = list(_pairs(pairs))
    tokenizer: Any = train_tokenizer([text for row in rows for text in row.values()], vocabulary=512)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = 1  # of the reward model
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config) if rewards else LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)  # with the usual 0.02, attention is nearly uniform
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    dataset = directory / "pairs.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "model", dataset


def _pairs(n: int) -> Iterator[dict[str, str]]:
    """Pairs of ragged lengths. In every fourth one, the answers begin alike."""
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    for i in range(n):
        start = text(2, 8) + " " if i % 4 == 1 else ""
        yield {"prompt": text(10, 40) + ": ", "chosen": start + text(4, 30), "rejected": start + text(4, 30)}


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with at most `vocabulary` tokens."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocabulary, special_tokens=[PAD, EOS], show_progress=False)
    tokenizer = Tokenizer.from_str(trained.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
