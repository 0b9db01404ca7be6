"""Rows of random tokens, which a probe runs packed and padded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..parts import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST = 24
"""Number of tokens of the longest prefix of the rows whose gradients are compared."""

SHORTEST_BRANCH = 7

ALIKE = 240
"""Number of tokens of a row that repeats one: three quarters of all, and evenly divided into most numbers of groups."""

TOKENS = 5 + (SHORTEST_BRANCH + 9 + 8) + LONGEST + (11 + 14)
"""Number of tokens of the packed rows, those of windows and of the row of equal tokens left out."""

Rows = Callable[[int, int, bool, int], tuple[Tensor, Tensor, Tensor]]
"""Makes rows of a probe (see `random_rows`)."""


def special_ids_of(model: PreTrainedModel, given: Sequence[int]) -> list[int]:
    """Ids of special tokens of a text: those that are given, and those that the configuration names, but for padding.
    Those of images stand for what rows of a probe do not have.
    """
    config, entries = text_config(model), (vars(x).items() for x in (text_config(model), model.config))
    named = {
        name: x for name, x in itertools.chain.from_iterable(entries) if name.endswith(("_token_id", "_token_index"))
    }
    of_text = ("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")
    others = {x for name, x in named.items() if name not in of_text and isinstance(x, int)}
    listed = [x for name in of_text for x in _listed(named.get(name))]
    ids = dict.fromkeys((*listed, *given))
    return [x for x in ids if x not in others and 0 <= x < config.vocab_size]


def _listed(x: Any) -> list[int]:
    return [] if x is None else [*x] if isinstance(x, list | tuple) else [x]


def random_rows(
    config: PretrainedConfig,
    special_ids: list[int] | None,
    device: torch.device,
    longest: int,
    alike: int,
    padded_left: bool,
    copies: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and mask [R, L] on a device, groups [R], in each copy: three short rows with one prefix, which may be padded
    on the left, and two long rows with another, of `longest` tokens. If there are special ids, these rows hold them,
    too, and there is a row of `alike` equal tokens, which may all go to the same expert.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> Tensor:
        drawn = torch.randint(config.vocab_size, (n,), generator=generator, device="cpu")
        for place, special in zip(range(1, n, 3), itertools.cycle(special_ids or ()), strict=False):
            drawn[place] = special
        return drawn

    rows, groups_of_rows = [], []
    for group in range(2 * copies):
        prefix, branches = (tokens(longest), (11, 14)) if group % 2 else (tokens(5), (SHORTEST_BRANCH, 9, 8))
        rows += [torch.cat([prefix, tokens(n)]) for n in branches]
        groups_of_rows += len(branches) * [group]
    if special_ids is not None:
        rows.append(tokens(1).repeat(alike))
        groups_of_rows.append(2 * copies + 1)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths, groups = torch.tensor([[len(row) for row in rows], groups_of_rows], device="cpu")
    mask = (torch.arange(ids.shape[1], device="cpu") < lengths[:, None]).long()
    for row, length in enumerate(lengths.tolist()):
        if padded_left and groups[row] % 2 == 0:
            ids[row], mask[row] = ids[row].roll(-length), mask[row].roll(-length)
    return ids.to(device), mask.to(device), groups
