"""A padded batch and its layouts, as one value for all calls of models with its tensors.

`PackedBatch` is made where a batch is collated, since the host has the ids there, or else in the first call of a
model. The batches that were used last are at hand, and a call takes one of them if it runs its tensors. These are
compared with copies of what the layouts were made from, because some writes raise no version: those to the `data` of a
tensor, and to its memory, as through NumPy. On the CPU, a batch that differs is packed again. On a device, the host
would have to wait for the comparison, so the layout is used, and an error is raised before the next step of an
optimizer, or in a later comparison if there is none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import packing
from ..ops.devices import is_capturing, is_host
from ..packing import IGNORE_INDEX, Form, Layout, NotPackable
from ..reasons import Reason
from . import reward_head
from .state import FusedForward, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORING_ARGUMENTS = {"labels", "shift_labels", "num_items_in_batch"}
"""Arguments that a model's own forward does not receive when only its logits are needed."""

NOT_OF_BACKBONE = {*SCORING_ARGUMENTS, "output_router_logits", "return_dict", "logits_to_keep"}
"""Arguments of a model call that are not passed on to its backbone."""

CALL_ARGUMENTS = {*NOT_OF_BACKBONE, "input_ids", "attention_mask", "position_ids", "use_cache"}
"""Arguments of a model call that the fused forward takes or can ignore."""

OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
OF_IMAGES = (
    *("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "image_position_ids"),
    "spatial_shapes",
)
IMAGE_ARGUMENTS = (*OF_TOKENS, *OF_IMAGES)
"""Arguments of a model call that hold types of tokens [R, L], or images."""

KEPT_BATCHES = 4
"""Number of batches that are at hand. A trainer may call policy and reference with two in turn, such as KTO's."""

recent: list[PackedBatch] = []
"""The batches that were used last, the newest first."""


def layout_of_call(model: PreTrainedModel, fused: FusedForward, batch: PaddedBatch, form: Form) -> Layout:
    """The layout of the batch of a packed call, as `layout_of` makes it, for a model as it was examined.

    Args:
        model: the model.
        fused: the state of its fused forward.
        batch: of the call.
        form: of its layout, as far as the model's options allow it.

    Raises:
        NotPackable: the batch has no packed form.
        RuntimeError: as `PackedBatch.runs_in`.
    """
    verdict, options, width = cast(Verdict, fused.verdict), fused.options, batch.input_ids.shape[1]
    if verdict.rope_limit is not None and width > verdict.rope_limit:  # all positions count, those of padding included
        form = form._replace(reach=width)
    if not options.share_prompts:
        form = form._replace(groups=None)
    layout = layout_of(batch, form)
    if not layout.is_left_padded or verdict.left_padding == "ignored":
        return layout
    if verdict.left_padding == "seen":
        raise NotPackable(Reason("left-padding", model=type(model).__name__))
    has_positions = batch.has_positions or (options.rewards and not options.rewards.runs_padded)
    return layout if has_positions else layout_of(batch, form._replace(count_padding=True))


def layout_of(batch: PaddedBatch, form: Form) -> Layout:
    """The layout of the batch of a call. A second call with the same tensors returns the same object, unless one has
    been written to.

    Raises:
        NotPackable: the batch has no packed form.
        RuntimeError: as `PackedBatch.runs_in`.
    """
    packed = next((x for x in recent if x.runs_in(batch)), None) or PackedBatch(batch)
    if form not in packed.layouts:
        with torch.inference_mode(False):  # an evaluation's layout may be that of a step, whose tensors autograd saves
            packed.layouts[form] = batch.pack(form)
    use(packed)
    return packed.layouts[form]


def use(batch: PackedBatch) -> None:
    """Has the next calls of models with the tensors of a batch take it."""
    recent[:] = [batch, *(x for x in recent if x is not batch)][:KEPT_BATCHES]


def as_current(inputs: Any) -> Any:
    """A batch of a loader, as a trainer is given it. The next calls of models with its tensors take its layout, if it
    has come with one, as its attribute `packed`.
    """
    packed = getattr(inputs, "packed", None)
    if packed is None:
        return inputs
    use(packed)
    return dict(inputs)


def inputs_once(maker: object, sources: Sequence[Tensor], make: Callable[[], Any]) -> Any:
    """The arguments of a model's call that `make` makes of tensors, or the reason why they are not supported. Calls for
    the same tensors, of the policy and of the reference, get the same arguments, and so the same layout.

    Args:
        maker: the state of a trainer. What others have made is not returned.
        sources: the tensors.
        make: makes the arguments.

    Raises:
        RuntimeError: as `PackedBatch.runs_in`.
    """
    made_by = weakref.ref(maker)
    inputs = next((x.inputs for x in recent if x.was_made_of(sources, made_by)), None) or make()
    if not isinstance(inputs, Reason) and all(x.inputs is not inputs for x in recent):
        use(PackedBatch(Call.of(inputs).batch, sources, inputs, made_by))
    return inputs


@contextmanager
def labels_from(source: Tensor | None, ids: Tensor, passes: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """In the block, the labels of calls with these ids follow from a tensor as those of the collated batch do, if the
    batch has come with it. They need not be the same tensor on a device then.

    Args:
        source: the tensor.
        ids: of the batch.
        passes: asked on a device, whether calls are given what follows from the tensor as it is.
    """
    is_needed = not is_host(ids.device) and passes()
    batches = [x for x in recent if is_needed and x.padded.input_ids is ids and any(y is source for y in x.sources)]
    for batch in batches:
        batch.labels_follow = True
    try:
        yield
    finally:
        for batch in batches:
            batch.labels_follow = False


class PaddedBatch(NamedTuple):
    """The arguments of a model call that a layout is made from.

    Attributes:
        input_ids: int64 [R, L].
        attention_mask: [R, L], 0 at padding.
        labels: int64 [R, L], `IGNORE_INDEX` where a token is not scored.
        shifted: whether `labels` came as `shift_labels`: position i then holds the token that i
            predicts.
        has_positions: whether the call is given positions, which then count its real tokens.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    shifted: bool
    has_positions: bool = False

    @classmethod
    def of_collated(cls, inputs: Mapping[str, Any], padding: int | None = None) -> PaddedBatch | None:
        """A collated batch, with the labels that a trainer computes from its "completion_mask" if it has none. None if
        it has no entries of text.

        Args:
            inputs: the batch.
            padding: the id of padding, if the batch is that of a reward model.
        """
        ids, mask, labels, completions = map(inputs.get, ("input_ids", "attention_mask", "labels", "completion_mask"))
        if not (isinstance(ids, Tensor) and isinstance(mask, Tensor)):
            return None
        is_scored = padding is not None
        if is_scored:
            labels = reward_head.labels_of(ids, padding)
        elif labels is None and isinstance(completions, Tensor) and completions.shape == ids.shape:
            labels = ids.masked_fill(completions == 0, IGNORE_INDEX)
        return cls(ids, mask, labels, shifted=is_scored) if isinstance(labels, Tensor) else None

    def form_reason(self) -> Reason | None:
        """Why the tensors have no form that is packed, whatever they hold, or None."""
        try:
            packing.require_batch("pack", *self[:3])
        except (TypeError, ValueError) as error:
            return Reason("batch-form", error=str(error).removeprefix("pack: "))
        return None

    @property
    def targets(self) -> Tensor:
        """The target of each position, [R, W]."""
        return self.labels if self.shifted else self.labels[:, 1:]

    def pack(self, form: Form) -> Layout:
        """A new layout of the batch.

        Raises:
            NotPackable: the batch has no packed form.
        """
        if form.groups == "pairs":
            rows = len(self.input_ids)
            is_even = rows and rows % 2 == 0
            form = form._replace(groups=torch.arange(rows, device="cpu") % (rows // 2) if is_even else None)
        return packing.make_layout(*self[:3], form, self.shifted)


class Call(NamedTuple):
    """A call of a model. Its arguments are read once, and all that decides, examines or runs it asks here.

    Attributes:
        args, kwargs: as they were given.
        batch: its rows. A tensor that was not given is None.
        routes: whether it asks for router logits; None if it does not say.
        of_tokens: types of tokens, [R, L] each.
        of_images: images, of any shape, those of the first half of the rows first.
    """

    args: tuple
    kwargs: dict[str, Any]
    batch: PaddedBatch
    routes: bool | None
    of_tokens: dict[str, Any]
    of_images: dict[str, Any]

    @classmethod
    def of(cls, kwargs: dict[str, Any], args: tuple = ()) -> Call:
        get: Any = kwargs.get
        shifted = get("shift_labels") is not None
        labels = get("shift_labels" if shifted else "labels")
        batch = PaddedBatch(get("input_ids"), get("attention_mask"), labels, shifted, get("position_ids") is not None)
        routes = get("output_router_logits")
        names = ((), ()) if CALL_ARGUMENTS.issuperset(kwargs) else (OF_TOKENS, OF_IMAGES)
        images = ({name: kwargs[name] for name in each if kwargs.get(name) is not None} for each in names)
        return cls(args, kwargs, batch, None if routes is None else bool(routes), *images)

    @property
    def has_images(self) -> bool:
        return bool(self.of_tokens or self.of_images)

    @property
    def device(self) -> torch.device | None:
        """That of its ids, or of another argument; None if it is given no tensor."""
        given = (self.batch.input_ids, *self.args, *self.kwargs.values())
        return next((x.device for x in given if isinstance(x, Tensor)), None)

    @property
    def padded_inputs(self) -> dict[str, Any]:
        """The keyword arguments of the backbone for the padded batch."""
        given = {name: x for name, x in self.kwargs.items() if x is not None and name not in NOT_OF_BACKBONE}
        return given | {"use_cache": False}


class PackedBatch:
    """A padded batch, and the layouts that were made of it.

    Args:
        padded: the batch.
        sources: the tensors that it was made of, or that its labels follow from.
        inputs: the arguments of a model's call that were made of the sources.
        maker: what has made them.

    Attributes:
        layouts: by how they were made.
        labels_follow: whether the labels of a call are known to follow from the sources, as those of the batch do.
    """

    def __init__(self, padded: PaddedBatch, sources: Sequence[Tensor] = (), inputs: Any = None, maker: Any = None):
        self.padded, self.sources, self.inputs, self.maker = padded, tuple(sources), inputs, maker
        self.layouts: dict[Form, Layout] = {}
        self.labels_follow = False
        self._versions = self._present_versions()
        self._copies, self._copied_sources = copies_of(padded[:3]), copies_of(sources if inputs else ())

    def runs_in(self, call: PaddedBatch) -> bool:
        """Whether a call runs this batch.

        Raises:
            RuntimeError: a batch on a device was written to after it was packed, which raised no version.
        """
        is_same = call.shifted == self.padded.shifted and self._holds(self.padded[:2], call[:2])
        is_known = call.labels is self.padded.labels or self.labels_follow or is_host(call.labels.device)
        return is_same and is_known and self.equals(call)

    def was_made_of(self, sources: Sequence[Tensor], maker: weakref.ref) -> bool:
        """Whether `inputs` were made of these tensors as they are. Raises as `runs_in` does."""
        is_same = self.maker == maker and self._holds(self.sources, sources)
        return is_same and are_as_copied(sources, self._copied_sources)

    def equals(self, other: PaddedBatch | None) -> bool:
        """Whether another batch has the values that this one has had. Raises as `runs_in` does."""
        return other is not None and are_as_copied(other[:3], self._copies)

    def _holds(self, own: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether these are tensors of the batch, and none of the batch has been written to, as far as versions say."""
        return [*map(id, own)] == [*map(id, others)] and self._versions == self._present_versions()

    def _present_versions(self) -> list[object]:
        """Tensors of inference mode have none. They are taken to change all the time."""
        return [object() if x.is_inference() else x._version for x in (*self.padded[:3], *self.sources)]


def count_real_tokens(position_ids: Any, attention_mask: Tensor) -> bool:
    """Whether positions count the real tokens of each row [R, L] from 0, as those of packed tokens do. One
    synchronization.
    """
    shapes = ((1, attention_mask.shape[1]), tuple(attention_mask.shape))
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) not in shapes:
        return False
    real = attention_mask != 0
    return bool(((position_ids == real.cumsum(1) - 1) | ~real).all())


unread: list[tuple[Tensor, torch.cuda.Event | None]] = []
"""Results of comparisons on devices. Those of a GPU are on their way to the host, where they are at an event."""


def copies_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone() for x in tensors)


def are_as_copied(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to copies that were made of them. On a device, they are taken to be, and are compared
    there without a synchronization.

    Raises:
        RuntimeError: those of an earlier comparison on a device were not.
    """
    raise_if_written(waits=False)
    if any((x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) for x, y in zip(tensors, copies, strict=True)):
        return False
    device = tensors[0].device
    if is_host(device):
        return all(map(torch.equal, tensors, copies))
    if not is_capturing(device):
        _compare_later(tensors, copies, device)
    return True


def raise_if_written(*, waits: bool) -> None:
    """Reads the results of comparisons on a device, of those that are there or, if it `waits`, of all.

    Raises:
        RuntimeError: tensors were not equal to their copies.
    """
    while unread and (waits or unread[0][1] is None or unread[0][1].query()):
        differs, arrived = unread.pop(0)
        if arrived is not None:
            arrived.synchronize()
        if differs:
            unread.clear()
            raise RuntimeError(
                "fastdpo: a batch must not be written to by `data` between its calls or after it was collated, which "
                "raises no version; got other values than those that were packed. Write to its tensors themselves, or "
                "replace them"
            )


def _compare_later(tensors: Sequence[Tensor], copies: Sequence[Tensor], device: torch.device) -> None:
    # NaN is equal to nothing, and is no change.
    differs = torch.stack([((x != y) & (x == x)).any() for x, y in zip(tensors, copies, strict=True)]).any()
    arrived = None
    if device.type == "cuda":
        differs = torch.empty_like(differs, device="cpu", pin_memory=True).copy_(differs, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
    unread.append((differs, arrived))
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(lambda *_: raise_if_written(waits=True))
