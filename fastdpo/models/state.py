"""The state of a model's fused forward: its options, what has been found out about the model, which parts of the model
have been replaced, and which of its calls have been logged.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..logs import NotFused, report, strict, warn
from ..ops.head.results import TokenLogps
from ..packing import Groups, Layout
from ..reasons import Reason
from . import attention, calls, head
from .examine.probe import LeftPadding, ProbeResult
from .examine.support import has_own_code
from .identity import harmless
from .identity.functions import hooks_of, of_users
from .identity.structure import Structure
from .mixers import finding
from .parts import backbone, logit_transform, rope_limit, text_config, vocabulary_of
from .pickling import ATTRIBUTE
from .ranks import sharding
from .ranks.sequence_group import Part, SequenceGroup
from .reward_head import RewardHead
from .running import Compile, Runner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .running.activations import KeptActivations


class ForwardOptions(NamedTuple):
    """The options of a model's fused forward.

    Attributes:
        integration: name under which calls are counted and logged, such as "trl.DPOTrainer".
        role: "policy", "reference" or "reward".
        rewards: how the model scores rows, if it is a reward model.
        kind_without_gradient: the kind that calls of a policy in training mode without gradients are
            counted as (see `calls.calls`).
        outputs: statistics to return next to log-probabilities (see `ops.linear_logps`).
        temperature: divides the logits.
        float32_head: whether the head computes in float32.
        share_prompts: whether tokens that rows of the same group begin with are computed once.
        groups: which rows of a batch are a group. In batches with images, pairs are.
        images: whether batches may hold images, those of the first rows of all pairs first.
        shifted: whether the labels that `fastdpo.score` is given are shifted.
        verify: whether calls are audited whatever the model, and those that differ raise an error.
        newer: the package of the prior forward, if it is newer than the tested versions, otherwise "". Calls are
            then audited, too.
        compile: whether packed calls run compiled layers and CUDA graphs, or "auto" (see `Runner`).
        sequence_group: the ranks that hold the parts of each batch, or None if a rank holds its own batches.
        special_ids: of the tokenizer's special tokens, where it is known.
    """

    integration: str
    role: str
    rewards: RewardHead | None = None
    kind_without_gradient: str = "policy"
    outputs: tuple[str, ...] = ()
    temperature: float = 1.0
    float32_head: bool = False
    share_prompts: bool = True
    groups: Groups = "content"
    images: bool = False
    shifted: bool = False
    verify: bool = False
    newer: str = ""
    compile: Compile = False
    sequence_group: SequenceGroup | None = None
    special_ids: tuple[int, ...] = ()

    def split_reason(self) -> Reason | None:
        """That accelerate was configured for context or sequence parallelism, by whichever trainer, and splits rows
        itself.
        """
        if self.sequence_group is not None or "accelerate" not in sys.modules:
            return None
        from accelerate.state import AcceleratorState

        parallelism = AcceleratorState._shared_state.get("parallelism_config")
        is_split = parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)
        return Reason("split-sequences", method="context or sequence parallelism") if is_split else None


class ScoredBatch(NamedTuple):
    """Result of one fused call.

    Attributes:
        logps: per-token results, [R, W] each, zero where nothing is scored. Those of a reward model hold the
            scores of the rows in the place of log-probabilities, [R, 1].
        label_mask: bool [R, W], where a token is scored.
        router_logits: of each layer, [T, experts] for T packed tokens; None if they were not
            requested.
        multiplicity: [1, T], how often each packed token occurs in the batch.
    """

    logps: TokenLogps
    label_mask: Tensor
    router_logits: tuple[Tensor, ...] | None
    multiplicity: Tensor


MakeOutput = Callable[[ScoredBatch, dict], object]
"""Makes a model's output from a scored batch and the keyword arguments of the call."""


class RunnableBatch(NamedTuple):
    """How a call runs: packed by its layout, or padded as it came, with
    a layout that says what is scored.

    Attributes:
        layout: of the batch.
        inputs: arguments of the backbone.
        args: positional arguments of the backbone.
        configs: those that name packed attention while it runs (see `attention.run`). None of them if it is padded.
        bare_head: whether hooks and a forward that other code has given the head are left out.
        routes: whether router logits are asked for.
        is_run: whether the runner runs the call (see `Runner.states`).
        shares_images: whether the images of each pair are run once.
        part: what this rank computes of the batch, if ranks share it. The inputs are those of its tokens.
    """

    layout: Layout
    inputs: dict[str, Any]
    args: tuple = ()
    configs: Sequence[PretrainedConfig] = ()
    bare_head: bool = False
    routes: bool = False
    is_run: bool = False
    shares_images: bool = False
    part: Part | None = None


class Route(NamedTuple):
    """How a call runs, and why not otherwise.

    Ranks that run a model together must run the same modules in the same order. In their first call they agree on
    whether the model is supported.

    Attributes:
        batch: packed, or padded next to ranks that run their packed batches; None if the call falls back.
        reason: why all calls of the model fall back, on all of these ranks.
        own: why the call is not packed. A rank may have this reason alone.
    """

    batch: RunnableBatch | None
    reason: Reason | None = None
    own: Reason | None = None


class ProbeKey(NamedTuple):
    """What the result of a probe holds for.

    Attributes:
        structure: the hash of the model's structure.
        is_training: whether the model was in training mode.
        is_sharded: whether ranks held parts of it. Engines shard a model that may have been probed before.
        trained: which of its parameters were trained (see `Identity.trained`), whose gradients were compared.
        form: see `Identity.form`.
    """

    structure: int
    is_training: bool
    is_sharded: bool
    trained: int
    form: int = 0

    def covers(self, trained: int) -> bool:
        """Whether the gradients that a call needs, of parameters that are trained, were compared in the probe."""
        return self.trained == trained or not (trained and torch.is_grad_enabled())


class Verdict(NamedTuple):
    """What has been found out about a model. It holds for as long as the model's identity stays the same.

    Attributes:
        key: of the probe's result.
        result: of the probe; of the model before, if it was not probed.
        scoring_reason: why the head, as it is on this rank, cannot score the targets of any call.
        packing_reason: why no batch is packed on this rank.
        backbone: of the model. It takes packed batches, and its head scores, unless there is a reason.
        head: of the model.
        configs: see `attention.configs_of`.
        vocabulary: see `parts.vocabulary_of`.
        rope_limit: see `parts.rope_limit`.
        routes: whether the model returns router logits unless a call says otherwise.
        logit_transform: (softcap, logit_scale) of the model.
        has_own_code: whether some of its code is of a package that is not known.
        is_audited: whether its calls are compared again while it trains (see `examine.verification`): it has such code
            or such hooks, or was not examined since values in it have changed.
        stores_all: whether packed rows are stored whole: mixers with such code may use the end of a row.
        is_checkpointed: whether some of its layers are, which may keep their activations (see `running.activations`).
    """

    key: ProbeKey
    result: ProbeResult | None
    scoring_reason: Reason | None
    packing_reason: Reason | None
    backbone: PreTrainedModel
    head: nn.Linear
    configs: list[PretrainedConfig]
    vocabulary: int | None
    rope_limit: int | None
    routes: bool
    logit_transform: tuple[float | None, float]
    has_own_code: bool
    is_audited: bool
    stores_all: bool
    is_checkpointed: bool

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        key: ProbeKey,
        result: ProbeResult | None,
        scoring_reason: Reason | None = None,
        packing_reason: Reason | None = None,
        has_changed: bool = False,
    ) -> Verdict:
        """With the backbone and the head of the model as it is, and facts about it."""
        routes = bool(getattr(text_config(model), "output_router_logits", False))
        of_model = backbone(model), head.head_of(model), attention.configs_of(model), vocabulary_of(model)
        has_own = has_own_code(model)
        if key.is_sharded:
            is_audited = result is not None and result.is_audited
        else:
            is_audited = has_own or has_changed or has_user_hooks(model)
        stores_all = has_own and bool(finding.mixers_of(model))
        of_code = rope_limit(model), routes, logit_transform(text_config(model)), has_own, is_audited, stores_all
        is_checkpointed = any(getattr(x, "gradient_checkpointing", False) for x in model.modules())
        return cls(key, result, scoring_reason, packing_reason, *of_model, *of_code, is_checkpointed)

    @property
    def reason(self) -> Reason | None:
        """Why all calls fall back, on all ranks that run the model together."""
        return self.result and self.result.unsupported_reason

    @property
    def left_padding(self) -> LeftPadding:
        """How padding on the left changes the states of rows (see `probe.ProbeResult`)."""
        return "ignored" if self.result is None else self.result.left_padding


@dataclass
class FusedForward:
    """The state of a model's fused forward.

    Attributes:
        options: what it computes.
        make_output: makes the output of fused calls.
        prior_forward: the forward before ours.
        prior_scores: whether the prior forward takes `fused_lm_head` and labels.
        autocast: in which the prior forward runs, if it does.
        logit_transform: (softcap, logit_scale) of a prior forward that scores, which it keeps; None if calls read the
            configuration.
        lasting_reason: why all calls go to the prior forward, whatever becomes of the model.
        choose: `deciding.choose`, excluded from compilation.
        examine: `deciding.model_reason`, excluded from compilation.
        runner: of the backbone.
        inner: an earlier fused forward, if other code has wrapped it since.
        is_switched: whether the model takes packed batches.
        forward: the function that is the model's forward now.
        probe_results: of the model as it was in each probe.
        ruled_out: why a probe has ruled the model out, by its code then, or by its kinds if it keeps state (see
            `Identity`).
        examinations: how often the model was examined, because it was new or had changed.
        sightings: number of calls since then in which it had a structure that is to be examined later.
        examined_tokens: by the key of a probe, the largest number of tokens of a packed batch that was examined.
        verdict: about the model as it was in its last call that asked for one; None before.
        image_results: of batches with images, by the same key, the names of the backbone's arguments, and whether each
            pair's images are run once.
        logged: reasons that have been logged, for which calls have fallen back, each with the role in which they did;
            and None with a role in which they were fused again.
        reasons: by role, why calls fall back whatever they are given, None if they do not, as of the last call.
        seen: the calls since a step has begun: "trained" for those of an integration with gradients, which it may have
            left to its trainer, their kinds for those without, and "other" for calls with gradients of other code.
        is_awaited: whether other ranks may examine the model in a call that this rank has left to its
            trainer.
        audited: number of calls, by their kind and whether they have gradients, since the model was examined.
    """

    options: ForwardOptions
    make_output: MakeOutput
    prior_forward: Callable
    prior_scores: bool
    autocast: torch.autocast | None
    logit_transform: tuple[float | None, float] | None
    lasting_reason: Reason | None
    choose: Callable[..., RunnableBatch | None]
    examine: Callable[..., Reason | None]
    runner: Runner
    inner: FusedForward | None
    is_switched: bool = False
    forward: Callable | None = None
    structure: Structure = field(default_factory=Structure)
    probe_results: dict[ProbeKey, ProbeResult] = field(default_factory=dict)
    ruled_out: dict[int, Reason] = field(default_factory=dict)
    examinations: int = 0
    sightings: Counter[ProbeKey] = field(default_factory=Counter)
    examined_tokens: dict[ProbeKey, int] = field(default_factory=dict)
    verdict: Verdict | None = None
    image_results: dict[tuple[ProbeKey, frozenset[str], bool], ProbeResult] = field(default_factory=dict)
    logged: set[tuple[str, Reason | None]] = field(default_factory=set)
    reasons: dict[str, Reason | None] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    is_awaited: bool = False
    audited: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def was_examined(self, model: PreTrainedModel) -> bool:
        """Whether the model was examined in its mode, sharded if it is, and with gradients if it trains."""
        mode = model.training, sharding.is_sharded(model)
        trains = model.training and any(x.requires_grad for x in model.parameters())
        examined = (key for key in self.probe_results if (key.is_training, key.is_sharded) == mode)
        return any(key.trained or not trains for key in examined)

    @property
    def probe_result(self) -> ProbeResult | None:
        """Of the model as it is; None before its first call."""
        return self.verdict and self.verdict.result

    @property
    def is_audited(self) -> bool:
        """Whether calls are compared with those of the prior forward (see `examine.verification`)."""
        asked = self.options.verify or bool(self.options.newer)
        return self.verdict is not None and (asked or self.verdict.is_audited)

    @property
    def kept(self) -> KeptActivations | None:
        """What keeps the activations of layers in a call of the model as it is, if some of them are checkpointed."""
        is_checkpointed = self.verdict is not None and self.verdict.is_checkpointed
        return self.runner.kept if is_checkpointed and not torch.compiler.is_compiling() else None

    def is_random(self, model: PreTrainedModel) -> bool:
        """Whether training is random. The probe misses dropout in an adapter whose weights are still zero."""
        seen = self.probe_result is not None and self.probe_result.is_random
        return seen or any(cast(nn.Dropout, x).p > 0 for x in self.structure.modules_of(model, nn.Dropout))

    def unsupported_reason(self) -> Reason | None:
        """Why all calls fall back, as far as is known."""
        return self.lasting_reason or (self.verdict and self.verdict.reason)

    def lasting_reason_of(self, model: PreTrainedModel) -> Reason | None:
        """`lasting_reason`, or that the model is a copy of the one that this is the state of."""
        return self.lasting_reason or (None if model in MODELS else Reason("copied-model"))

    def count(self, model: PreTrainedModel, ids: object, route: Route) -> None:
        """Counts a call with these ids, and logs why it falls back."""
        (batch, reason, own), integration, kind = route, self.options.integration, self.kind_of_call(model)
        calls.calls[integration, kind, "stock" if batch is None else "fused" if own is None else "padded"] += 1
        if isinstance(ids, Tensor):
            used = (batch.layout.unshared, len(batch.layout.token_index)) if batch else (ids.numel(), ids.numel())
            calls.count_tokens(integration, ids.numel(), *used)
        if reason is not None or own is not None:
            self.log_once(cast(Reason, reason or own), kind)
        if own is None:
            self._note_model(kind, reason)

    def see(self, model: PreTrainedModel) -> None:
        """Takes note of a call of an integration."""
        self.seen.add("trained" if torch.is_grad_enabled() else self.kind_of_call(model))

    def kind_of_call(self, model: PreTrainedModel) -> str:
        """The kind that a call is counted as (see `calls.calls`)."""
        kind = calls.kind_of_calls.get()
        if kind is not None:
            return kind
        if self.options.role == "reward":
            return "reward"
        if self.options.role == "reference" or self._adapter_is_reference(model):
            return "reference"
        if torch.is_grad_enabled():
            return "policy"
        return self.options.kind_without_gradient if model.training else "eval"

    def _adapter_is_reference(self, model: PreTrainedModel) -> bool:
        """Whether PEFT's adapters are disabled, or switched to the copy that TRL names "ref"."""
        if "peft" not in sys.modules:
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = cast("list[BaseTunerLayer]", self.structure.modules_of(model, BaseTunerLayer))
        return bool(layers) and (layers[0].disable_adapters or "ref" in layers[0].active_adapters)

    def log_once(self, reason: Reason, kind: str = "") -> None:
        """Reports that a call of a kind falls back: each reason once, and once more if such calls were fused before. In
        strict mode, raises each time.
        """
        role = self._role(kind)
        has_changed = role in self.reasons and self.reasons[role] is None and (role, reason) not in self.logged
        if self.options.sequence_group is not None:
            raise NotFused(f"{self.options.integration} ({role}): no sequences are shared by ranks, {reason.named}")
        if strict() or has_changed or reason not in {logged for _, logged in self.logged}:
            self.logged.add((role, reason))
            report(f"{self.options.integration} ({role}): not fused, {reason.named}")

    def _note_model(self, kind: str, reason: Reason | None) -> None:
        """Notes why calls of a kind fall back, whatever they are given, and logs once that they are fused again."""
        role = self._role(kind)
        if reason is None and self.reasons.get(role) is not None and (role, None) not in self.logged:
            self.logged.add((role, None))
            warn(f"{self.options.integration} ({role}): fused again")
        self.reasons[role] = reason

    def _role(self, kind: str) -> str:
        """The role of a model in a call of a kind: a policy may be its own reference."""
        return "reference" if kind == "reference" else self.options.role


def has_user_hooks(model: PreTrainedModel) -> bool:
    """Whether modules of a model's backbone have hooks of packages that are not known."""
    return any(of_users(hooks_of(module), harmless.MODULES) for module in backbone(model).modules())


MODELS: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""The models that have a fused forward. A copy of one has its state, and is not among them."""


def states() -> list[tuple[PreTrainedModel, FusedForward]]:
    """`MODELS`, each with the state of its fused forward."""
    return [(model, vars(model)[ATTRIBUTE]) for model in MODELS]


def state_of(model: nn.Module | None) -> FusedForward | None:
    """The state of a model's fused forward, if there is a model and it has one."""
    return None if model is None else vars(model).get(ATTRIBUTE)
