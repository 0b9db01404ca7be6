"""Tokenizers with one token per word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(words: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """The words must have `<pad>`, `<eos>` and `<unk>` among them, and no special token as a prefix of another word."""
    word_level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=word_level, **special, **options)
