"""Log-probabilities from a head whose vocabulary is cut over ranks (tensor parallelism).

Each rank has consecutive rows of the weight and of the bias, and the hidden states and targets of all
N tokens. It computes the results of its part (see `merged_parts`). One collective gathers those of all
ranks, 5 numbers a token and one for each statistic. The backward sums the gradients of the hidden
states over ranks, [N, D] in the dtype of sums, if they need one; those of weight and bias are local.
Both collectives are made once a call, whatever the sizes of the parts.

Dimensions: N scored tokens, V vocabulary entries of this rank, D hidden size, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from ... import checks
from ...packing import IGNORE_INDEX
from ..devices import accumulation_dtype
from .logit_rows import GradientInputs
from .merged_parts import EXCHANGED, merge_parts
from .passes import backward_pass, empty_outputs, forward_pass, scaled
from .results import statistic_names
from .tiles import HeadCall, Part


@dataclass(frozen=True)
class VocabularyGroup:
    """The ranks that a head's vocabulary is cut over.

    Each rank has consecutive rows of the weight, in the order of the ranks of a process group. The
    numbers of rows may differ.

    Attributes:
        name: of the process group.
        sizes: the number of rows of each rank, at least 1.
        rank: of this process in the group.
    """

    name: str
    sizes: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, rows: int, process_group: dist.ProcessGroup | None = None) -> VocabularyGroup:
        """The group of a head of which this rank has `rows` rows.

        Every rank of the process group (default: that of all ranks) must call this once, when the
        model is made: the numbers of rows are gathered.
        """
        op = "VocabularyGroup.of"
        checks.require_positive_integer(op, "rows", rows)
        initialized = dist.is_available() and dist.is_initialized()
        checks.require(initialized, op, "torch.distributed", "be initialized", "no process group")
        group = process_group or dist.group.WORLD
        sizes: list[int] = [0] * dist.get_world_size(group)
        dist.all_gather_object(sizes, int(rows), group)
        return cls.of_sizes(sizes, group)  # pyright: ignore[reportArgumentType]

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], process_group: dist.ProcessGroup) -> VocabularyGroup:
        """The group of a head whose numbers of rows are known. Makes no collective."""
        return cls(process_group.group_name, tuple(sizes), dist.get_rank(process_group))

    @property
    def part(self) -> Part:
        """The vocabulary entries of this rank, and their number on all ranks."""
        start = sum(self.sizes[: self.rank])
        return start, start + self.sizes[self.rank], sum(self.sizes)


def require_group(op: str, group: object, weight: Tensor) -> None:
    if not isinstance(group, VocabularyGroup):
        rule = "be a VocabularyGroup or None (VocabularyGroup.of(len(weight), process_group))"
        raise TypeError(f"{op}: group must {rule}; got {checks.shown(group)}")
    rule = "have the {} rows that group.sizes gives rank {}"
    checks.require(
        len(weight) == group.sizes[group.rank], op, "weight", rule, len(weight), group.sizes[group.rank], group.rank
    )


def process_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def forward_of_part(
    call: HeadCall, group: VocabularyGroup, statistics: str, keep: int, form_jacobian: bool
) -> list[Tensor]:
    """The forward of one rank.

    Returns:
        Gradient tiles and jacobian as of `forward_pass`; logps over the whole vocabulary; shift, others
        and total of the part, and the other vectors of `number_of_sums`; then the statistics over the
        whole vocabulary. [N] each
    """
    targets, (start, stop, _) = call.targets, group.part
    if not len(targets):
        return empty_outputs(call, statistics, keep, form_jacobian)
    names = [*statistic_names(statistics), *EXCHANGED]
    kept, jacobian, *results = forward_pass(call, ",".join(names), keep, form_jacobian)
    _, shift, others, total, *extra, target_logits = results
    of_part = dict(zip(names, extra, strict=True)) | dict(target_logits=target_logits, shift=shift, others=others)
    gathered = torch.stack([x.to(others.dtype) for x in of_part.values()])  # [F, N]
    of_all = gathered.new_empty(len(group.sizes), *gathered.shape)  # [R, F, N]
    dist.all_gather(list(of_all), gathered, process_group(group.name))
    fields = dict(zip(of_part, of_all.unbind(1), strict=True))

    merged = merge_parts(fields, targets, group.sizes, group.rank, statistics)
    logps, whole, target_logits, share, rest, of_entropy = merged
    ignored = targets == IGNORE_INDEX
    has_target = (targets >= start) & (targets < stop)
    slope = call.transform.slope(target_logits)
    gain = call.transform.gain if slope is None else call.transform.gain * slope
    of_targets = torch.where(has_target, rest * gain, 0.0)
    logps, *whole = (x.masked_fill_(ignored, 0) for x in (logps, *whole))
    return [kept, jacobian, logps, shift, others, total, share, of_targets, *of_entropy, *whole]


def backward_of_part(
    call: HeadCall,
    group: VocabularyGroup,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    kept: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    needs: Sequence[bool],
    main_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as of `backward_pass`, that of hidden summed over ranks."""
    *row_sums, share, of_targets = sums[:5]
    hidden, ignored = call.hidden, call.targets == IGNORE_INDEX
    upstream = torch.zeros_like(share) if grad_logps is None else grad_logps.masked_fill(ignored, 0)
    entropy_of_part = mean_offset = None
    if grad_entropy is not None:
        entropy_share, mean_offset = sums[5:]
        grad_entropy = grad_entropy.masked_fill(ignored, 0)
        entropy_of_part = scaled(entropy_share, grad_entropy)
        mean_offset = mean_offset.masked_fill(grad_entropy == 0, 0)  # NaN where the target is unknown
    if needs[0]:  # partial gradients of hidden are summed before they are rounded
        call = call._replace(hidden=hidden.to(accumulation_dtype(call.compute_dtype)))
    inputs = GradientInputs(
        *row_sums, grad_logps=scaled(share, upstream), grad_entropy=entropy_of_part, mean_offset=mean_offset
    )
    of_targets = scaled(of_targets, upstream)
    grad_hidden, *others = backward_pass(call, inputs, kept, jacobian, needs, main_grad, of_targets)
    if len(grad_hidden):
        dist.all_reduce(grad_hidden, group=process_group(group.name))
    return grad_hidden.to(hidden.dtype), *others  # pyright: ignore[reportReturnType]
