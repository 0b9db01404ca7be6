"""The model and the preference pairs that real programs train on, written to disk in place."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.support.comparison import SIZES, sharpen
from tests.support.words import word_tokenizer

SPECIAL = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "user", "assistant", "system")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@dataclass(frozen=True)
class Workload:
    """The sizes of a training. Lengths are in words."""

    vocabulary: int = 64
    hidden: int = 32
    layers: int = 2
    prompt: tuple[int, int] = (3, 9)
    completion: tuple[int, int] = (2, 7)
    pairs: int = 6
    batch: int = 2
    steps: int = 3

    def pairs_of_text(self) -> list[dict[str, str]]:
        """Ragged preference pairs: `prompt`, `chosen` and `rejected`."""
        rng = random.Random(0)

        def text(lengths: tuple[int, int]) -> str:
            words = (f"w{rng.randrange(self.vocabulary - len(SPECIAL))}" for _ in range(rng.randint(*lengths)))
            return " ".join(words)

        lengths = {"prompt": self.prompt, "chosen": self.completion, "rejected": self.completion}
        return [{name: text(length) for name, length in lengths.items()} for _ in range(self.pairs)]

    def write_model(self, directory: Path, seed: int = 0) -> Path:
        """Saves a small Llama with random weights, and its tokenizer. Returns the directory.

        transformers 5 replaces the tokenizers of some families by those of their classes.
        """
        torch.manual_seed(seed)
        sizes = dict(hidden_size=self.hidden, intermediate_size=2 * self.hidden, num_hidden_layers=self.layers)
        sizes |= dict(vocab_size=self.vocabulary, max_position_embeddings=4096)
        config = LlamaConfig(**SIZES | sizes, architectures=["LlamaForCausalLM"])
        model = AutoModelForCausalLM.from_config(config)
        if self == TINY:
            sharpen(model)
        model.save_pretrained(directory)
        self.tokenizer().save_pretrained(directory)
        return directory

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = word_tokenizer([*SPECIAL, *(f"w{i}" for i in range(self.vocabulary - len(SPECIAL)))])
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer


TINY = Workload()
"""For tests."""
MEASURED = Workload(
    vocabulary=32_000, hidden=256, layers=6, prompt=(150, 300), completion=(60, 180), pairs=24, batch=4, steps=6
)
"""For the table of step times: large enough that the model's time counts."""
