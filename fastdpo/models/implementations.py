"""The attention implementations of transformers that packed attention takes the place of, and its own names, one for
each of them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from .parts import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HUB_REPOSITORIES = tuple(
    f"kernels-community/{name}"
    for name in ("flash-attn", "flash-attn2", "flash-attn3", "vllm-flash-attn3", "flash-attn4", "aiter-flash-attn")
)
"""Builds of flash attention on the Kernels Hub. transformers takes some of them where flash attention is requested and
its package is not installed.
"""

FLASH_IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", *HUB_REPOSITORIES)
SUPPORTED_PRIORS = ("sdpa", "eager", *FLASH_IMPLEMENTATIONS)
"""Attention implementations that `attention.switch` can replace, without the revision of a repository."""

PREFIX = "fastdpo_"
_SHORT = {"flash_attention_": "fa"}
_SHORT_IN_REPOSITORIES = {"/": "~~", "flash": "f~sh"}
"""For a name that contains "flash" or a slash, transformers looks for a package or on the Hub."""


def implementation(model: PreTrainedModel) -> str:
    """The model's attention implementation, or the one that it had before `attention.switch`."""
    return prior_of(present(model) or "eager")


def present(model: PreTrainedModel) -> str | None:
    """The model's attention implementation."""
    return text_config(model)._attn_implementation


def is_supported(prior: str) -> bool:
    """Whether `attention.switch` can replace an attention implementation."""
    return repository(prior) in SUPPORTED_PRIORS


def repository(name: str) -> str:
    """A name without the revision and the function that may follow that of a repository."""
    return name.partition(":")[0].partition("@")[0].strip()


@cache
def packed_name(prior: str) -> PackedName:
    """The name of packed attention in the place of an implementation."""
    for long, short in (_SHORT_IN_REPOSITORIES if "/" in prior else _SHORT).items():
        prior = prior.replace(long, short)
    return PackedName(PREFIX + prior)


def prior_of(name: str) -> str:
    """The inverse of `packed_name`. Other names stay as they are."""
    if not name.startswith(PREFIX):
        return name
    prior = name.removeprefix(PREFIX)
    for long, short in (_SHORT_IN_REPOSITORIES if _SHORT_IN_REPOSITORIES["/"] in prior else _SHORT).items():
        prior = prior.replace(short, long)
    return prior


class PackedName(str):
    """The name of a packed attention. Copies and pickles of a configuration hold the prior name
    instead.

    A copy of a model is not switched, and another process has not registered the packed attention.

    The compiler of torch 2.11 finds it in a dictionary only if it is the key itself (see `packed_name`), and traces
    those of its methods that are written in Python.
    """

    __slots__ = ()

    def startswith(self, prefix: str | tuple[str, ...], *bounds: int) -> bool:
        if isinstance(prefix, str) and len(prefix) <= len(PREFIX) and not bounds:
            return PREFIX.startswith(prefix)
        return super().startswith(prefix, *bounds)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (prior_of(self),)
