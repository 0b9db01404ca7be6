"""`fastdpo.prepare`, `score` and `restore`: the fused scoring of a model in a custom training loop."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .. import checks
from ..models import forward
from ..models.batch import Call
from ..models.calls import calls
from ..models.identity.functions import module_of
from ..models.parts import base_of, input_device_of, text_config, unknown_wrapper
from ..models.ranks import splitting
from ..models.ranks.sequence_group import SequenceGroup
from ..models.running import Compile
from ..models.state import MODELS, ForwardOptions, FusedForward, Groups, state_of
from ..ops.devices import is_transformed
from ..ops.head.results import requested_statistics, statistic_names
from ..packing import IGNORE_INDEX
from ..reasons import Reason
from ..row_forms import require_ids
from . import scored_rows, switching
from .bypass import existing_instances
from .options import require_compile
from .padded_calls import Rows, padded_call, require_arguments
from .scored_rows import ScoredRows

NAME = "fastdpo.score"
"""The name under which calls are counted and logged."""

RETURNING = "return the output of the transformers model inside: score that model, or return it in the forward"
"""What `score` requires of a wrapper."""

M = TypeVar("M", bound=nn.Module)

_outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that were scored with gradients and that no DDP is around. A new DDP clears it."""


def prepare(
    model: M,
    *,
    groups: Groups = "content",
    outputs: Sequence[str] = (),
    shifted: bool = False,
    compile: Compile = "auto",
    sequence_group: dist.ProcessGroup | None = None,
) -> M:
    """Makes a model score batches by `fastdpo.score`. All other calls of the model behave as before. `disable_adapter`
    and `set_adapter` of a PeftModel do the same as before, in less time.

    Call it once, before or after DDP, FSDP2, ZeRO-3, PEFT or `torch.compile` wrap the model. Calling it again
    replaces the options. A copy of a prepared model falls back until it is prepared itself.

    Args:
        model: a causal LM of transformers, or a wrapper around one.
        groups: which rows may share the tokens that they begin with, which are then computed once: "content", all
            rows that begin alike, in any order, or "pairs", rows i and i + R/2 of R rows.
        outputs: statistics of the tokens next to their log-probabilities: "entropy", "mean_logits", "is_top1" and
            "log_sum_sq_probs" (see `ops.linear_logps`).
        shifted: whether the labels of a batch are shifted already, so that position i holds the token that i predicts.
        compile: compile the decoder layers for packed calls, and replay CUDA graphs (see `fastdpo.patch`). With "auto",
            as many steps are expected as the optimizers of the process have made so far.
        sequence_group: the ranks that hold the parts of each batch, for rows that do not fit on one device. All of
            them call `score` with the same rows, hold an equal number of the packed tokens, and get the results of
            all. Gradients must be averaged over the group, as DDP and FSDP2 over all ranks do.

    Returns:
        The model itself.

    Raises:
        TypeError: there is no transformers model in `model`, or a wrapper around it that is not known to return its
            output, `shifted` is no bool, `compile` neither a bool nor "auto", or `sequence_group` no process group of
            this rank.
        ValueError: `groups` or `outputs` have other values, or the model belongs to a patched trainer, whose calls it
            would not take any more.
        NotFused: with `FASTDPO_STRICT=1` or a `sequence_group`, the model is known not to be supported.
    """
    base, wrapper = base_of(model, "prepare"), unknown_wrapper(model)
    rule = "be a transformers model, or one that PEFT, torch or an engine has wrapped: prepare the model inside"
    checks.require(wrapper is None, "prepare", "model", rule, f"a {type(wrapper).__name__}", error=TypeError)
    owner = state_of(base)
    is_free = owner is None or base not in MODELS or _is_prepared(base)
    rule = "not belong to a patched trainer: call fastdpo.unpatch() first, or prepare a copy"
    checks.require(is_free, "prepare", "model", rule, f"a model of {owner and owner.options.integration}")
    checks.require(groups in get_args(Groups), "prepare", "groups", f"be one of {get_args(Groups)}", repr(groups))
    checks.require_flags("prepare", shifted=shifted)
    require_compile("prepare", compile)
    statistics = tuple(statistic_names(requested_statistics("prepare", outputs)))
    options = ForwardOptions(
        NAME, "policy", outputs=statistics, groups=groups, images=True, shifted=shifted, compile=compile
    )._replace(sequence_group=_group_of(sequence_group))
    forward.install(base, options, functools.partial(ScoredRows.of, text_config(base)), prior_scores=False)
    switching.install(model)
    return model


def _group_of(given: dist.ProcessGroup | None) -> SequenceGroup | None:
    """The sequence group of a process group. None for one of this rank alone."""
    if given is None:
        return None
    is_own = isinstance(given, dist.ProcessGroup) and given.rank() >= 0
    rule = "be a process group that this rank belongs to"
    checks.require(is_own, "prepare", "sequence_group", rule, f"a {type(given).__name__}", error=TypeError)
    return SequenceGroup.of(given) if given.size() > 1 else None


def restore(model: M) -> M:
    """Undoes `prepare`, also for a copy of a prepared model, and returns the model. Does nothing if the model is not
    prepared.

    Raises:
        TypeError: there is no transformers model in `model`.
    """
    base = base_of(model, "restore")
    if _is_prepared(base):
        forward.uninstall(base)
        switching.uninstall_unused()
    return model


def score(
    model: nn.Module,
    input_ids: Rows,
    attention_mask: Tensor | None = None,
    labels: Rows | None = None,
    *,
    shift_labels: Rows | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> ScoredRows:
    """The log-probabilities of the labels of a batch, by one call of a prepared model.

    The rows are packed, what they begin with is computed once, and logits are never stored whole. The model is called
    as it is given, so the hooks of DDP, FSDP2, ZeRO-3, PEFT and autocast run. A model or a batch that is not supported
    is scored from the model's own logits, with the same result and one logged reason.

    The rows come in one of three forms:

    - padded, `input_ids` and `labels` int64 [R, L], on either side;
    - flat, [T] or [1, T], with `cu_seqlens`;
    - as a list of R lists or tensors of ids, and labels of the same lengths.

    Rows of the last two forms are padded on the right, so L is the length of the longest.

    Args:
        model: a model after `prepare`, or a wrapper around it. Pass the outermost wrapper.
        input_ids: the ids of prompts and completions.
        attention_mask: [R, L] of padded rows, 0 at padding. Without it, all tokens are real. This suits rows that are
            padded on the right behind their last label, where padding changes nothing but a router's auxiliary loss.
        labels: the ids where a token is scored and -100 elsewhere, as for the model's own loss. `prepare` says whether
            they are shifted.
        shift_labels: labels that are shifted, in the place of `labels`, whatever `prepare` says.
        cu_seqlens: int [R + 1] bounds of the rows of a flat batch. Its `position_ids`, if they are given, count from
            0 in each row.
        **kwargs: further arguments of the model, such as `pixel_values` or `output_router_logits`, but none that change
            what it returns. Those by which transformers says where rows of a flat batch begin (`cu_seq_lens_q`, or
            `position_ids` that begin again) are taken as `cu_seqlens`.

    Returns:
        `ScoredRows`.

    Raises:
        TypeError, ValueError: the model is not prepared, or an argument breaks a rule above; the message names it.
            Also for labels that have the other form, shifted or not, for the model inside of a
            DistributedDataParallel, for an argument that neither this function nor the model has, and for a wrapper
            that returns something else than the output of the model inside.
            Also on all ranks of a `sequence_group` if they were given different rows, or if one of them raises it.
        NotFused: with `FASTDPO_STRICT=1` or a `sequence_group`, the call is not fused.
    """
    base = base_of(model, "score")
    if not _is_prepared(base):
        raise ValueError(f"score: model must be prepared by fastdpo.prepare(model); got {type(model).__name__}")
    fused = cast(FusedForward, state_of(base))
    with splitting.in_step(fused.options.sequence_group, input_device_of(base)):
        if torch.is_grad_enabled() and model not in _outermost:
            _require_outermost(model, base)
            if fused.options.sequence_group is not None:
                _require_averaged(model, fused.options.sequence_group)
        given = labels if labels is not None else shift_labels
        if given is None or (labels is not None and shift_labels is not None):
            raise ValueError("score: labels must be given, or shift_labels in their place; got neither or both")
        require_arguments(model, kwargs, inspect.signature(prepare).parameters)
        shifted = fused.options.shifted or labels is None
        batch = padded_call(base, input_ids, attention_mask, given, shifted, cu_seqlens, kwargs)
        targets, called_before = Call.of(batch).batch.targets, calls.total()

        def of_logits(called: Any) -> ScoredRows:
            if calls.total() == called_before:
                forward.record_fallback(base, NAME, Reason("unreached-forward"))
            if not is_transformed():
                on_host = (x.cpu().numpy() for x in (batch["input_ids"], targets, targets != IGNORE_INDEX))
                require_ids("score", *on_host, shifted=shifted)
            output = called()
            is_output = isinstance(getattr(output, "logits", None), Tensor)
            checks.require(is_output, "score", "model", RETURNING, f"a {type(output).__name__}", error=TypeError)
            return ScoredRows.of_output(output, targets, fused.options.outputs)

        try:
            return scored_rows.score(model, NAME, {**batch, "use_cache": False}, lambda rows: rows, of_logits)
        except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            explained = _explained(error, model, "shift_labels" if labels is None else "labels")
            if explained is None:
                raise
            raise explained from error


def _explained(error: Exception, model: nn.Module, labels: str) -> Exception | None:
    """An error of a call as one of `score`: that of an op that names an argument, with the name that the labels came
    by, or one of a wrapper that does not return the output of the model inside. None for others.
    """
    of_argument = re.fullmatch(r"(?:pack|linear_logps|token_logps): (labels|targets|attention_mask)( .*)", str(error))
    if of_argument is not None:
        name, rest = of_argument.groups()
        return type(error)(f"score: {name if name == 'attention_mask' else labels}{rest}")
    wrapper = None if str(error).startswith("score: ") else unknown_wrapper(model)
    got = f"{type(error).__name__} in {type(wrapper).__name__}: {error}"
    return None if wrapper is None else TypeError(f"score: model must {RETURNING}; got {got}")


def _require_outermost(model: nn.Module, base: nn.Module) -> None:
    """Requires that no DDP is around a model whose gradients are to be computed. With several ranks, looks once at each
    model, and again after a DDP was made.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    _watch_wrapping()
    inside = {id(module) for module in model.modules()}
    for wrapper in existing_instances(DistributedDataParallel):
        is_around = id(wrapper) not in inside and any(module is base for module in wrapper.modules())
        rule = "be the DistributedDataParallel around it, without which each rank trains alone"
        checks.require(not is_around, "score", "model", rule, f"the {type(model).__name__} inside")
    _outermost.add(model)


def _require_averaged(model: nn.Module, group: SequenceGroup) -> None:
    """Requires the engine of a model, if it has one, to average gradients over all ranks of a sequence group."""
    engines: list[tuple[str, Iterable[int]]] = []
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            engines.append((name, dist.get_process_group_ranks(module.process_group)))
        elif module_of(type(module)).startswith(("deepspeed.", "torch.distributed.fsdp.fully_sharded")):
            engines.append((name, ()))
    meshes = {x.device_mesh for x in model.parameters() if x.requires_grad and isinstance(x, DTensor)}
    engines += [("FSDPModule", mesh.mesh.flatten().tolist()) for mesh in meshes]
    rule = "be one of DistributedDataParallel or FSDP2 over all ranks of its sequence_group, or of no engine"
    for name, ranks in engines:
        checks.require(group.is_within(ranks), "score", "model", rule, f"a {name} that does not average over them")


@functools.cache
def _watch_wrapping() -> None:
    def look_again(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            _outermost.clear()

    register_module_module_registration_hook(look_again)


def _is_prepared(base: nn.Module) -> bool:
    fused = state_of(base)
    return fused is not None and fused.options.integration == NAME
