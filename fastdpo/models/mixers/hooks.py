"""Makes the mixers of a model take layouts, by hooks on them.

Import this module only where a model is switched: Dynamo, which it needs, imports Triton.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...packing import is_layout
from . import current, modeling_files
from .current import RunningMixer
from .finding import called_by, mixers_of
from .segments import collect, gather_all, segments_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def switch(model: PreTrainedModel) -> None:
    """Makes the mixers of a model accept `Layout.mask` as a padding mask. Does nothing if they do."""
    mixers = mixers_of(model)
    if mixers:
        modeling_files.switch(model)
    for mixer in mixers:
        before, after = (enter, leave) if called_by(mixer) else (unfold, fold)
        if before not in mixer._forward_pre_hooks.values():
            _remove_hooks(mixer)
            mixer.register_forward_pre_hook(before, with_kwargs=True)
            mixer.register_forward_hook(after, always_call=True)


def restore(model: PreTrainedModel, kept: Collection[nn.Module] = ()) -> None:
    """Undoes `switch`, but not for the modules that are kept. Works for copies of a switched model, too."""
    for module in model.modules():
        if module not in kept:
            _remove_hooks(module)
    modeling_files.release(id(model))


def enter(mixer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Takes a layout from the arguments of a mixer that calls known functions.

    Raises:
        RuntimeError: the functions have been replaced since the model was switched, by some that
            may not take packed tokens.
    """
    layout, hidden = _layout_and_hidden(args, kwargs)
    if layout is None:
        return None
    _begin_packed(mixer, layout, hidden.device)
    return _without(layout, args, kwargs)


def leave(mixer: nn.Module, args: tuple, output: Any) -> None:
    """Checks what a mixer has called.

    Raises:
        RuntimeError: it has not called all functions that its forward names, so that tokens may
            have been mixed by other code, which took the packed tokens for one row.
    """
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden is None or len(hidden) == 1:  # packed tokens are one row
        _end(mixer, raised=hidden is None)


def unfold(mixer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Runs a mixer of other functions on whole rows, which are padded on the right."""
    layout, hidden = _layout_and_hidden(args, kwargs)
    if layout is None:
        return None
    return _begin_whole_rows(layout, hidden.device, _without(layout, args, kwargs))


def fold(mixer: nn.Module, args: tuple, output: Any) -> Any:
    """Puts the results of whole rows back in the order of packed tokens."""
    return _collect_rows(mixer, output)


def _remove_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (enter, leave, unfold, fold)]:
            del hooks[number]
            for flags in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                flags.pop(number, None)


def _layout_and_hidden(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor]:
    """The layout among the arguments of a mixer, and the first of the other tensors."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    layout = next((x for x in tensors if is_layout(x)), None)
    return layout, next(x for x in tensors if x is not layout)


def _without(layout: Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    args = tuple(None if x is layout else x for x in args)
    return args, {name: None if x is layout else x for name, x in kwargs.items()}


@torch.compiler.disable(reason="its indices depend on a layout")
def _begin_whole_rows(layout: Tensor, device: torch.device, arguments: tuple) -> tuple:
    segments = segments_of(layout, device)
    current.begin(RunningMixer(segments, frozenset()))
    (index,) = segments.whole_rows.batches
    return gather_all(arguments, 1, segments.tokens, index)


@torch.compiler.disable(reason="see `current`")
def _collect_rows(mixer: nn.Module, output: Any) -> Any:
    ran = current.end()
    if ran is None or output is None:  # None: the mixer raised
        return output
    current.record(mixer)
    sequences = ran.segments.whole_rows
    (index,), place = sequences.batches, sequences.place

    def collected(x: Any) -> Any:
        return collect([x], 1, place) if isinstance(x, Tensor) and x.shape[:2] == index.shape else x

    return tuple(map(collected, output)) if isinstance(output, tuple) else collected(output)


@torch.compiler.disable(reason="a layout is read on the host")
def _begin_packed(mixer: nn.Module, layout: Tensor, device: torch.device) -> None:
    expected = called_by(mixer)
    if not expected:
        raise RuntimeError(f"the functions that {type(mixer).__name__} calls have been replaced since it was examined")
    current.begin(RunningMixer(segments_of(layout, device), expected))


@torch.compiler.disable(reason="see `current`")
def _end(mixer: nn.Module, raised: bool) -> None:
    ran = current.end()
    if ran is None or raised:  # checkpointing raises when it has what it needs
        return
    missed = ran.expected - ran.called
    if missed:
        raise RuntimeError(f"{type(mixer).__name__} did not call {', '.join(sorted(missed))} on packed tokens")
    current.record(mixer)
