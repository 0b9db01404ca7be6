"""The trainer line: one trainer class in a range of versions, and how it is patched.

Each line is a subclass of `TrainerLine`. What all of them do stands here: trainers that are created
while their class is patched get a state and fused models, and those that existed before stay as
they are.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from ..logs import report
from ..models import forward
from ..models.batch import as_current
from ..models.parts import find_base, text_config, without_engines
from ..models.reward_head import CLASSIFIER_HEAD, RewardHead
from ..models.state import MODELS, ForwardOptions, FusedForward, Groups, MakeOutput, state_of
from ..reasons import Reason
from . import switching, training_events
from .admission.signatures import arguments_of, attribute_of, parameters_of, signature_difference
from .admission.tested_code import code_of, code_relied_on, differing
from .admission.versions import installed_version
from .bypass import STATE, leave_unpatched, report_skipped_init
from .collating import packing_batches
from .options import PatchOptions
from .replacements import Replacements, temporarily
from .scored_rows import ScoredRows
from .trainer_state import TrainerState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CREATE_ACCELERATOR = "create_accelerator_and_postprocess"
"""The function in which a trainer of transformers creates its accelerator, the last step before
models are prepared."""


class TrainerLine:
    """One trainer class in a range of versions, and how it is patched.

    A function is written as "name" if it is one of the trainer class, as ":name" if it is one of its module, and as
    "module:name" if it is one of another module.

    Attributes:
        class_name: that of the class; by default, the last part of `name`.
        parameters: of functions that the line calls, the names of their parameters. "..." at the end stands for any
            others.
        relies_on: the functions whose results the line computes by itself. A newer version in which they have other
            code is left as it is.
        options_rely_on: by option of the trainer, functions that it relies on as well. In a newer version in which they
            have other code, the trainer does without it.
        replaced: the functions of the class or of its module that methods of the line with these names replace, for
            trainers that are patched. A method has the parameters of the function, with the stock function in front.
        logged: the statistics of the policy's tokens, next to their log-probabilities (see `ops.linear_logps`).
        rewards: how the trainer's model scores rows, if it is a reward model.
        cutting: the `trl.max_tokens.budget.Budget` by which `max_tokens` cuts the trainer's steps, or None.
        name: of the trainer, such as "trl.DPOTrainer", which begins with that of its package.
        module_name: the module that defines the class.
        newer: the packages, the trainer's and those that all trainers rely on, that are newer than the tested versions.
        options: of `patch()`.
        replacements: all that is replaced while the trainer is patched.
        creating: the trainer whose `__init__` runs, or None.
        budget: `cutting`, while the trainer is patched with `max_tokens`, otherwise None.
    """

    class_name: str = ""
    parameters: ClassVar[Mapping[str, list[str]]] = {}
    relies_on: ClassVar[tuple[str, ...]] = ()
    options_rely_on: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    replaced: ClassVar[tuple[str, ...]] = ()
    logged: ClassVar[tuple[str, ...]] = ()
    rewards: ClassVar[RewardHead | None] = None
    cutting: ClassVar[Any] = None

    options: PatchOptions
    creating: Any = None
    budget: Any = None

    def __init__(self, name: str, module_name: str, newer: Collection[str] = ()):
        self.name, self.module_name, self.newer = name, module_name, newer
        self.class_name = self.class_name or name.rpartition(".")[2]
        self.replacements = Replacements()
        self._patched_class: Any = None
        # By their ids: a trainer class that is a dataclass has instances without a hash.
        self._trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    # What a line may define.

    def models(self, trainer: Any) -> Mapping[str, nn.Module]:
        """The models that a trainer has now, by role: "policy" and "reference". PEFT and engines may have wrapped them.
        They are its attributes `model` and `ref_model`.
        """
        wrapped = {role: vars(trainer).get(name) for role, name in (("policy", "model"), ("reference", "ref_model"))}
        return {role: without_engines(model) for role, model in wrapped.items() if model is not None}

    def unsupported_reason(self) -> Reason | None:
        """How the functions that are replaced differ from those that were tested, or None. Changes nothing. May raise
        ImportError.
        """
        differences = (
            signature_difference(*self.function(written), expected, may_grow=self.is_newer)
            for written, expected in self.expected_parameters().items()
        )
        reason = next(filter(None, differences), None)
        if reason is None and self.newer and (changed := differing(code_relied_on(self), self.newer)):
            return Reason("changed-code", functions=", ".join(changed))
        return reason

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        """Why a trainer that is created with these arguments by name is left unpatched, or None."""

    def prepared_reason(self, trainer: Any) -> Reason | None:
        """Why a trainer is left unpatched whose models are about to be prepared, or None."""

    def replace(self) -> None:
        """Replaces the functions in which the trainer scores batches, by `self.replacements`."""
        for written in self.replaced:
            name = written.removeprefix(":")
            if name == written:
                self.wrap(name, functools.partial(self._call_if_patched, getattr(self, name)))
            else:
                self.replacements.wrap(self.module(), name, getattr(self, name))

    def init(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Calls the `__init__` of a trainer that has a state."""
        stock(trainer, *args, **kwargs)

    def statistics(self, trainer: Any) -> tuple[str, ...]:
        """`logged`, and what else the policy of a trainer needs."""
        return self.logged

    def packs_collated(self) -> bool:
        """Whether batches are packed where they are collated, if the line replaces `collating.REPLACED`."""
        return True

    def padding(self, trainer: Any) -> int | None:
        """The id of padding, if the trainer trains a reward model, which scores the last token with another one."""

    def request(self, trainer: Any, role: str) -> ForwardOptions:
        """What the fused forward of a model computes."""
        is_reward = role == "reward"  # whose only label is that of the last token, behind all that rows share
        args, compile = getattr(trainer, "args", None), self.options.compile
        if getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", "") == "colocate" and compile == "auto":
            compile = False  # recordings would take memory that the engine counts on
        return ForwardOptions(
            self.name,
            role,
            rewards=CLASSIFIER_HEAD if is_reward else self.rewards,
            outputs=self.statistics(trainer) if role == "policy" else (),  # only the policy's feed metrics
            newer=next((f"{x} {installed_version(x)}" for x in (self.package, *self.newer) if x in self.newer), ""),
            share_prompts=self.options.share_prompts,
            compile=compile,
            verify=self.options.verify,
            special_ids=_special_ids(getattr(trainer, "processing_class", None)),
        )

    def make_output(self, model: Any) -> MakeOutput:
        """Makes the output of a model's fused calls. It must not refer to the line: models are copied."""
        return functools.partial(ScoredRows.of, text_config(model))

    def unused(self, trainer: Any, reason: Reason) -> None:
        """Says that the first step of a trainer has made no call to fuse."""
        report(f"{self.name} ({type(trainer).__name__}): not fused, {reason.named}")

    # What the functions of a line call.

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_newer(self) -> bool:
        """Whether the trainer's package is newer than the tested versions."""
        return self.package in self.newer

    def function(self, written: str) -> tuple[str, Any]:
        """The full name of a function, and the function, or None if it is missing."""
        module, separator, name = written.rpartition(":")
        if separator:
            scope = importlib.import_module(module) if module else self.module()
            return f"{scope.__name__}.{name}", attribute_of(scope, name)
        return f"{self.module().__name__}.{self.class_name}.{name}", attribute_of(self.trainer_class(), name)

    def expected_parameters(self) -> dict[str, list[str]]:
        """The parameters of all functions that are replaced or called."""
        created = {_CREATE_ACCELERATOR: ["self"]} if hasattr(self.trainer_class(), "add_callback") else {}
        replaced = {written: parameters_of(getattr(self, written.removeprefix(":"))) for written in self.replaced}
        return {**created, **replaced, **self.parameters}

    def changed_code(self, functions: Iterable[str]) -> list[str]:
        """The full names of those functions that have other code than a tested version, in packages that are newer."""
        return differing(code_of(self, functions), self.newer) if self.newer else []

    def wrap(self, name: str, function: Callable) -> None:
        """Replaces a function of the trainer class (see `Replacements.wrap`)."""
        self.replacements.wrap(self.trainer_class(), name, function)

    def fuses(self, trainer: Any, model: Any) -> bool:
        """Whether the calls of a model by a trainer that is patched are to be fused."""
        return forward.is_installed(model, self.name)

    def state_of(self, trainer: Any) -> Any:
        """The state of a trainer that this line has patched, or None."""
        state = vars(trainer).get(STATE)
        return state if getattr(state, "name", None) == self.name else None

    def policy(self, trainer: Any) -> Any:
        """The policy among the models of a trainer, or `trainer.model` where the line is not told its models."""
        return self.models(trainer).get("policy", getattr(trainer, "model", None))

    def noting(self, trainer: Any, model: Any) -> Any:
        """The model that a trainer's loss calls: while its steps are cut, one that notes or knows its scores."""
        budget = getattr(self.state_of(trainer), "budget", None)
        return model if budget is None else budget.noting(model)

    @property
    def groups(self) -> Groups | None:
        """Which rows of a batch that comes with its layout may share a prefix."""
        return "content" if self.options.share_prompts else None

    # Lines replace these whose batches come with layouts.

    def _prepare_inputs(self, stock: Callable, trainer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """With this, a step or a micro-batch begins."""
        return stock(trainer, as_current(inputs), *args, **kwargs)

    def get_train_dataloader(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Where steps are cut, micro-batches are packed instead, of units that may be dealt to the ranks."""
        if self.budget is None or not self.budget.cuts(trainer):
            packing = packing_batches(trainer, self.groups, self.padding(trainer))
            with packing if self.packs_collated() else nullcontext():
                return stock(trainer, *args, **kwargs)
        loader = stock(trainer, *args, **kwargs)
        self.budget.deal(trainer, loader)
        return loader

    def prepare(self, trainer: Any) -> None:
        """Gives the models that a trainer has now the fused forward, unless they have the one that it asks for. Does
        nothing if it is not patched.

        Called when the accelerator is created and, since transformers 4 sets the policy after that, once more after
        `__init__`. Called again when a training or an evaluation begins: the trainer may have another model by then,
        and other trainers may have prepared the same one.
        """
        state = self.state_of(trainer)
        reason = None if state is None else self.prepared_reason(trainer)
        if reason is not None:
            leave_unpatched(trainer, self.name, reason)
        elif state is not None:
            # What scores a trainer's completions runs as before unless it holds a transformers model.
            rewards = filter(None, map(find_base, vars(trainer).get("reward_funcs") or ()))
            state.forwards.clear()
            for role, model in (*self.models(trainer).items(), *(("reward", base) for base in rewards)):
                base = find_base(model)
                if base is None:
                    report(f"{self.name} ({role}): not fused, {Reason('model-type', kind=type(model).__name__).named}")
                elif base not in state.forwards:  # a policy may be its own reference
                    self.install(trainer, role, model, base)
                    state.models.add(model)
                    fused = state_of(base)
                    if fused is not None:
                        state.forwards[base] = weakref.ref(fused)
            policy = self.policy(trainer)
            if policy is not None:
                switching.install(policy)
            switching.unwrap_at_once(trainer, state.undo)

    def attach(self, trainer: Any) -> None:
        """Prepares the models of a trainer that was made, and watches its steps."""
        if self.budget is not None:
            self.budget.attach(trainer)
        self.prepare(trainer)
        if hasattr(trainer, "add_callback"):
            trainer.add_callback(training_events.watching(self, trainer))

    def install(self, trainer: Any, role: str, model: nn.Module, base: PreTrainedModel) -> None:
        """Makes the transformers model in a model score batches."""
        self.install_options(base, self.request(trainer, role))

    def install_options(self, base: PreTrainedModel, options: ForwardOptions, *, prior_scores: bool = False) -> None:
        """Gives a model the fused forward with these options, unless it has it."""
        fused = cast(FusedForward, state_of(base)) if base in MODELS else None
        if fused is None or fused.options._replace(special_ids=options.special_ids) != options:
            make_output = options.rewards.make_output if options.rewards else self.make_output(base)
            forward.install(base, options, make_output, prior_scores=prior_scores)
        else:
            fused.options = options  # the trainer may have its tokenizer by now
            forward.forget_weights(base)

    # What `patch` calls.

    def module(self) -> ModuleType:
        """The module that defines the trainer class. Its package may still be incomplete: `fastdpo run` patches as soon
        as the module was imported.
        """
        return importlib.import_module(self.module_name)

    def trainer_class(self) -> Any:
        """The trainer class. While it is patched it is known, since programs may put a subclass in its place. `enable`
        leaves its existing instances as they are.
        """
        return self._patched_class or getattr(self.module(), self.class_name)

    def enable(self, options: PatchOptions) -> None:
        """Patches the trainer class. Called only if `unsupported_reason` has returned None."""
        self.options = options
        self._patched_class = self.trainer_class()
        self.wrap("__init__", self._init)
        self.replace()
        self.budget = None if self.cutting is None else self.cutting.with_line(self)
        if hasattr(self.trainer_class(), _CREATE_ACCELERATOR):  # a trainer of transformers
            self.wrap(_CREATE_ACCELERATOR, self._create_accelerator)
            for name, function in training_events.FUNCTIONS.items():
                self.wrap(name, functools.partial(function, self))

    def disable(self) -> None:
        """Restores the trainer class, and the trainers that were created since `enable`, with their models."""
        self.replacements.close()
        self._patched_class = None
        for trainer in list(self._trainers.values()):
            state = self.state_of(trainer)
            if state is not None:
                state.undo.close()
            vars(trainer).pop(STATE, None)
        self._trainers.clear()
        forward.uninstall_all(self.name)
        switching.uninstall_unused()

    def _init(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not self._takes(trainer):
            stock(trainer, *args, **kwargs)
            return
        reason = self.disabled_reason(arguments_of(stock, trainer, *args, **kwargs))
        with temporarily(self, creating=trainer):
            if reason is not None:
                leave_unpatched(trainer, self.name, reason)
                stock(trainer, *args, **kwargs)
                return
            vars(trainer)[STATE] = TrainerState(name=self.name)
            self.init(stock, trainer, *args, **kwargs)
        self.attach(trainer)

    def _create_accelerator(self, stock: Callable, trainer: Any) -> None:
        if not self._takes(trainer):
            stock(trainer)
            return
        report_skipped_init(trainer, self.name, self.trainer_class())
        stock(trainer)
        self.prepare(trainer)

    def attach_copy(self, trainer: Any) -> None:
        """Gives a copy of a trainer, or a trainer that was loaded, a state of its own."""
        if vars(trainer).get(STATE) == self.name:
            self._trainers[id(trainer)] = trainer
            vars(trainer)[STATE] = TrainerState(name=self.name)
            self.attach(trainer)

    def _call_if_patched(self, method: Callable, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the line in the place of the stock function, unless a trainer is not patched by it."""
        function = stock if self.state_of(trainer) is None else functools.partial(method, stock)
        return function(trainer, *args, **kwargs)

    def _takes(self, trainer: Any) -> bool:
        """Takes a trainer, unless the line of a subclass has given it its state, or has left it unpatched."""
        if STATE in vars(trainer) and id(trainer) not in self._trainers:
            return False
        self._trainers[id(trainer)] = trainer
        return True


def _special_ids(processing_class: Any) -> tuple[int, ...]:
    """Ids of the special tokens of a tokenizer, or of that of a processor."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return tuple(getattr(tokenizer, "all_special_ids", ()))
