"""The memory of one DPO step in TRL, by a run of the step on tensors without memory.

The model's own code, TRL's or fastdpo's forward and autograd run as in a training, on fake tensors
(`torch._subclasses.FakeTensorMode`). So no formula has to know a model family, an adapter or gradient
checkpointing: the bytes are those of the tensors that the step creates.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ...integrations import patching
from ...models import forward
from ...models.attention import inputs_of
from ...models.batch import layout_of_call
from ...models.deciding import scoring_unsupported_reason
from ...models.examine.probe import ProbeResult
from ...models.mixers import segments
from ...models.parts import base_of
from ...models.reward_head import CLASSIFIER_HEAD
from ...models.state import (
    ForwardOptions,
    FusedForward,
    ProbeKey,
    RunnableBatch,
    Verdict,
    install_head,
    state_of,
    switch_attention,
)
from ...ops.head.linear_logps import budget_for
from ...ops.head.results import LOGGED_STATISTICS
from ...packing import IGNORE_INDEX
from .batches import PADDING
from .ledger import MemoryLedger
from .scratch import scratch_of_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ...models.mixers.segments import Segments

DPO, REWARD = "trl.DPOTrainer", "trl.RewardTrainer"
OPTIMIZER_COPIES = {"adamw_torch_fused": 2, "adamw_torch": 2, "rmsprop": 1, "adagrad": 1, "sgd": 0}
"""Copies of the trainable parameters that the optimizers of `TrainingArguments.optim` keep."""


@dataclass(frozen=True)
class Setup:
    """What a training is configured to do.

    Attributes:
        config: of the model.
        device: "cpu" or "cuda".
        device_memory: bytes of the GPU, or None if they are not known or the device is a CPU.
        dtype: of the weights.
        autocast: whether the step runs under autocast to bfloat16 (`DPOConfig(bf16=True)`).
        lora: keyword arguments of `peft.LoraConfig`, or None for full fine-tuning.
        precomputed_reference: whether the reference's log-probabilities are in the dataset.
        checkpointing: whether every layer is recomputed in the backward.
        accumulates: whether gradients of an earlier batch are kept during the step.
        optimizer: one of `OPTIMIZER_COPIES`.
        rewards: whether the model is a reward model, which has no reference.
    """

    config: PretrainedConfig
    device: str = "cpu"
    device_memory: int | None = None
    dtype: torch.dtype = torch.float32
    autocast: bool = True
    lora: dict[str, Any] | None = None
    precomputed_reference: bool = False
    checkpointing: bool = True
    accumulates: bool = False
    optimizer: str = "adamw_torch_fused"
    rewards: bool = False


class StepMemory(NamedTuple):
    """Bytes of a step.

    Attributes:
        weights: the policy's parameters and buffers.
        reference_weights: those of a reference model of its own.
        optimizer: states of the optimizer.
        gradients: of the trainable parameters, all at once.
        activations: tensors kept from the policy's forward, without those of the head.
        head: largest additional memory of the policy's head, in its forward and backward.
        reference: largest additional memory of the reference's forward.
        step: largest memory in use during the step above weights and optimizer states; not the sum
            of its parts, which do not reach their largest sizes at the same time.
    """

    weights: int
    reference_weights: int
    optimizer: int
    gradients: int
    activations: int
    head: int
    reference: int
    step: int

    @property
    def total(self) -> int:
        """Largest memory in use."""
        return self.weights + self.reference_weights + self.optimizer + self.step


def simulate(setup: Setup, batch: dict[str, Tensor], *, patched: bool) -> StepMemory:
    """The memory of a step on a batch.

    Args:
        setup: the training.
        batch: input_ids, attention_mask and, unless the model is a reward model, labels, int64 [2B, L] on the CPU;
            rows i and B + i are a pair.
        patched: whether fastdpo is on. It is then assumed that the model passes its probe.

    Raises:
        ValueError: fastdpo does not support the model, or its code cannot run on fake tensors.
    """
    with ExitStack() as stack:
        if patched:
            if not setup.rewards:
                stack.enter_context(patching.patched(DPO, memory_budget=_head_budget(setup)))
            stack.enter_context(_readable_layouts())
        elif setup.device == "cuda":
            stack.enter_context(_triton_head())
        return _Step(setup, batch, patched).run()


def _head_budget(setup: Setup) -> int:
    """The default `memory_budget` of the policy's head."""
    text = setup.config.get_text_config()
    trained = text.vocab_size * text.hidden_size if setup.lora is None else 0
    return budget_for(trained, setup.device_memory)


def returns_router_logits(config: PretrainedConfig) -> bool:
    """Whether TRL adds the auxiliary loss of routers for a model."""
    text = config.get_text_config()
    return hasattr(text, "output_router_logits") and bool(getattr(text, "router_aux_loss_coef", 0.0))


class _Step:
    """One step of a trainer whose models are fake tensors."""

    def __init__(self, setup: Setup, batch: dict[str, Tensor], patched: bool) -> None:
        self.setup, self.fake = setup, FakeTensorMode(allow_non_fake_inputs=True)
        self.policy, self.reference = _build(setup)
        self.base: Any = base_of(self.policy, "estimate")
        self.weights = _materialize(self.policy, self.fake)
        self.reference_weights = 0 if self.reference is None else _materialize(self.reference, self.fake)
        self.policy.train()
        if not setup.rewards:
            self._add_heads()
        elif patched:
            options = ForwardOptions(REWARD, "policy", CLASSIFIER_HEAD)
            forward.install(self.base, options, CLASSIFIER_HEAD.make_output, prior_scores=False)
        models = [self.base]
        if self.reference is not None:
            models.append(self.reference)
        if setup.checkpointing:
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # now, and its former name
            next(getattr(self.base, name) for name in names if hasattr(self.base, name))()
            if setup.lora is not None:
                self.base.enable_input_require_grads()
        routes = returns_router_logits(setup.config) and not setup.rewards
        self.options = {"output_router_logits": True} if routes else {}
        for model, options in zip(models, (self.options, {}), strict=False) if patched else ():
            _fix_batch(model, batch | options, self.fake.from_tensor)
        self.inputs = {name: self.fake.from_tensor(x) for name, x in batch.items()}
        scored = 0 if setup.rewards else int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        held = [x for model in filter(None, (self.policy, self.reference)) for x in _tensors(model)]
        self.ledger = MemoryLedger(scratch_of_head(setup.device, setup.device_memory), scored, held)
        self.activations = self.head = self.reference_run = 0

    def _add_heads(self) -> None:
        from trl.trainer import dpo_trainer

        add_head: Any = getattr(dpo_trainer, "add_fused_lm_head")  # noqa: B009
        add_head(self.base, outputs=("log_probs", *LOGGED_STATISTICS))
        if self.reference is not None:
            add_head(self.reference.eval())

    def run(self) -> StepMemory:
        """Runs the step.

        Raises:
            ValueError: the model's code cannot run on fake tensors.
        """
        try:
            with self.fake, self.ledger:
                return self._run()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            name = type(self.base).__name__
            raise ValueError(f"estimate: {name} cannot be run on fake tensors: {error}") from error

    def _run(self) -> StepMemory:
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        gradients = sum(p.numel() * p.element_size() for p in trainable)
        hook = self.base.base_model.register_forward_hook(self._start_head)
        self.ledger.start_peak("step")
        for _ in range(1 + self.setup.accumulates):
            loss = self._loss()
            self.ledger.start_peak("head")
            loss.backward()
            del loss
        hook.remove()
        return StepMemory(
            self.weights,
            self.reference_weights,
            OPTIMIZER_COPIES[self.setup.optimizer] * gradients,
            gradients,
            self.activations,
            self.head,
            self.reference_run,
            self.ledger.stop_peak("step"),
        )

    def _loss(self) -> Tensor:
        """Computes as TRL does: as `RewardTrainer.compute_loss`, or as `DPOTrainer._compute_loss`, in its order:
        policy, reference, loss.
        """
        self._before = self.ledger.live
        output = self._call(self.policy, **self.options)
        self._end_head()
        if self.setup.rewards:
            chosen, rejected = output.logits.squeeze(-1).chunk(2)
            return -nn.functional.logsigmoid(chosen - rejected).mean()
        reference: Any = 0.0
        if not self.setup.precomputed_reference:
            self.ledger.start_peak("reference")
            with torch.no_grad(), self.policy.disable_adapter() if self.reference is None else nullcontext():
                reference = self._call(self.reference or self.policy).log_probs.sum(1)
            self.reference_run = self.ledger.stop_peak("reference")
        chosen, rejected = (output.log_probs.sum(1) - reference).chunk(2)
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        return loss if output.aux_loss is None else loss + output.aux_loss

    def _call(self, model: nn.Module, **options: Any) -> Any:
        """accelerate runs each model under an autocast of its own."""
        with torch.autocast("cpu", torch.bfloat16) if self.setup.autocast else nullcontext():
            scoring = {} if self.setup.rewards else {"fused_lm_head": True}
            return model(**self.inputs, use_cache=False, **scoring, **options)

    def _start_head(self, backbone: nn.Module, inputs: Any, output: Any) -> None:
        """After the backbone's forward. Its gradient ends the backward of the head."""
        hidden = output.last_hidden_state
        if hidden.requires_grad:
            self.activations = self.ledger.live - self._before
            self.ledger.start_peak("head")
            hidden.register_hook(lambda gradient: self._end_head())

    def _end_head(self) -> None:
        self.head = max(self.head, self.ledger.stop_peak("head"))


def _fix_batch(model: PreTrainedModel, kwargs: dict, convert: Callable[[Tensor], Tensor]) -> None:
    """Makes every call of a model run one batch packed. A model of fake tensors cannot be examined.

    Args:
        model: with a fused forward, in the mode in which it will be called.
        kwargs: the arguments of a call with the batch, whose tensors have values.
        convert: makes the tensors that the calls use. What attention reads on the host stays as it is.

    Raises:
        ValueError: the model is known not to be supported.
        NotPackable: the batch has no packed form.
    """
    fused = cast(FusedForward, state_of(model))
    reason = fused.lasting_reason or scoring_unsupported_reason(model, fused.options)
    if reason is not None:
        raise ValueError(reason)
    fused.verdict = Verdict.of(model, ProbeKey(0, model.training, False), ProbeResult(None))
    if fused.options.rewards:
        kwargs = fused.options.rewards.with_scored_tokens(model, kwargs)
    layout = layout_of_call(model, fused, kwargs)
    switch_attention(model, fused)
    install_head(model, fused)
    inputs = inputs_of(layout, kwargs["input_ids"])
    inputs |= {name: convert(inputs[name]) for name in ("input_ids", "position_ids")}
    tensors = {name: x for name, x in vars(layout).items() if isinstance(x, Tensor) and name != "rows"}
    batch = RunnableBatch(replace(layout, **{name: convert(x) for name, x in tensors.items()}), inputs, {})
    fused.choose = lambda *args: batch


def _build(setup: Setup) -> tuple[Any, Any]:
    """Policy and reference on the meta device, as TRL makes them."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if setup.rewards else AutoModelForCausalLM

    def model() -> PreTrainedModel:
        config = copy.deepcopy(setup.config)
        if setup.rewards:
            config.get_text_config().pad_token_id = PADDING  # that of the tokenizer in TRL
        with torch.device("meta"):
            return kind.from_config(config, dtype=setup.dtype)

    policy = model()
    if setup.lora is None:
        return policy, None if setup.precomputed_reference or setup.rewards else model()
    from peft import LoraConfig, get_peft_model

    return get_peft_model(policy, LoraConfig(task_type="SEQ_CLS" if setup.rewards else "CAUSAL_LM", **setup.lora)), None


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _materialize(model: nn.Module, fake: FakeTensorMode) -> int:
    """Replaces parameters and buffers on the meta device by fake ones on the CPU. Returns their bytes."""
    memo: dict[int, Tensor] = {}

    def fake_of(x: Tensor) -> Tensor:
        if id(x) not in memo:
            empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
        return memo[id(x)]

    with fake:
        for module in model.modules():
            for tensors in cast("list[dict[str, Tensor | None]]", [module._parameters, module._buffers]):
                for name, x in tensors.items():
                    if x is not None:
                        tensors[name] = fake_of(x)
    return sum(x.numel() * x.element_size() for x in memo.values())


@contextmanager
def _readable_layouts() -> Iterator[None]:
    """Lets mixers read their layouts, whose values are real, while all other tensors are fake."""
    from ...models.mixers import hooks

    def segments_of(layout: Tensor, device: torch.device) -> Segments:
        with _disable_current_modes():
            return segments.segments_of(layout, device)

    try:
        with mock.patch.object(hooks, "segments_of", segments_of):
            yield
    finally:
        segments.forget()  # their indices are fake


@contextmanager
def _triton_head() -> Iterator[None]:
    """Lets TRL's head allocate what it does on a GPU: it scores labelled positions only, by kernels that need no
    memory of their own.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    with ExitStack() as stack:
        for module in (chunked_logprob, utils):
            stack.enter_context(mock.patch.object(module, "_use_triton", return_value=True))
        for kernel in ("_forward_kernel", "_backward_kernel"):
            does_nothing = defaultdict(lambda: lambda *args, **options: None)  # launched as `kernel[grid](...)`
            stack.enter_context(mock.patch.object(chunked_logprob, kernel, does_nothing))
        yield
