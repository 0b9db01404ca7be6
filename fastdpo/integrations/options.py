"""The options of `patch()`: each is declared once, with its check, its flags and the trainers that it applies to.

Trainers and processes that are created later use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from .. import checks

if TYPE_CHECKING:
    from ..models.state import SharePrompts

_DPO = "trl.DPOTrainer"


class Option(NamedTuple):
    """How an option is given.

    Attributes:
        check: given the public function, the option's name and a value, returns the value that `PatchOptions`
            holds, or raises an error.
        flags: those of `fastdpo run`, which exclude each other, with the arguments of `add_argument`.
        trainers: the only ones that it applies to, or None for all.
    """

    check: Callable[[str, str, Any], Any]
    flags: Mapping[str, Mapping[str, Any]]
    trainers: tuple[str, ...] | None = None


def _flag(op: str, name: str, value: Any) -> bool:
    checks.require_flags(op, **{name: value})
    return value


def _sharing(op: str, name: str, value: Any) -> SharePrompts:
    if isinstance(value, bool) or (isinstance(value, str) and value == "deterministic"):
        return value  # pyright: ignore[reportReturnType]
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f'{op}: {name} must be True, False or "deterministic"; got {checks.shown(value)}')


def _bytes(op: str, name: str, value: Any) -> int | None:
    checks.require_bytes(op, **{name: value})
    return None if value is None else int(value)


def _tokens(op: str, name: str, value: Any) -> int | Literal["auto"] | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    checks.require_integer(op, name, value, rule := 'be a positive integer, "auto" or None')
    checks.require(int(value) > 0, op, name, rule, value)
    return int(value)


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _option(default: object, *declared: Any) -> Any:
    return field(default=default, metadata={"option": Option(*declared)})


def _constant(value: object, help: str) -> dict[str, object]:
    return dict(action="store_const", const=value, help=help)


@dataclass(frozen=True)
class PatchOptions:
    """The options of `patch()`, which explains them."""

    share_prompts: SharePrompts = _option(  # noqa: RUF009
        True,
        _sharing,
        {
            "--no-share-prompts": _constant(False, "compute a prompt for each of its answers"),
            "--no-share-random-prompts": _constant("deterministic", "do so while dropout is active"),
        },
    )
    memory_budget: int | None = _option(
        None, _bytes, {"--memory-budget": dict(metavar="SIZE", help="gradient tiles of the head to keep, such as 2GiB")}
    )
    verify: bool = _option(False, _flag, {"--verify": _constant(True, "compare the first fused calls with stock ones")})
    max_tokens: int | Literal["auto"] | None = _option(
        None,
        _tokens,
        {
            "--max-tokens": dict(
                type=number_or_auto, metavar="TOKENS", help="cut the rows of each step by distinct tokens, or auto"
            )
        },
        (_DPO, *(f"trl.{x}Trainer" for x in ("Reward", "KTO", "SFT", "GRPO", "RLOO"))),
    )
    compile: bool = _option(False, _flag, {"--compile": _constant(True, "compile the decoder layers for packed calls")})
    graphs: bool = _option(False, _flag, {"--graphs": _constant(True, "replay CUDA graphs of packed calls")})
    provisional: bool = _option(
        True, _flag, {"--no-provisional": _constant(False, "leave trainers of versions newer than the tested ones")}
    )

    def of_forward(self) -> dict[str, Any]:
        """Those that are options of a fused forward (`models.state.ForwardOptions`)."""
        names = ("share_prompts", "memory_budget", "verify", "compile", "graphs")
        return {name: getattr(self, name) for name in names}


class GivenOptions(TypedDict, total=False):
    """The arguments of `patch()` that are options, of which any may be given, for type checkers."""

    share_prompts: SharePrompts
    memory_budget: int | None
    verify: bool
    max_tokens: int | Literal["auto"] | None
    compile: bool
    graphs: bool
    provisional: bool


OPTIONS: dict[str, Option] = {x.name: x.metadata["option"] for x in fields(PatchOptions) if x.metadata}
"""The options by their names."""


def applies(name: str, trainer: str) -> bool:
    """Whether an option applies to a trainer."""
    trainers = OPTIONS[name].trainers
    return trainers is None or trainer in trainers


def specific_options(trainer: str) -> list[str]:
    """The options that apply to some trainers only, and to this one."""
    return [name for name, option in OPTIONS.items() if option.trainers is not None and trainer in option.trainers]


def checked_options(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `patch()` as `PatchOptions` holds them.

    Args:
        op: the public function, for its error messages.
        given: by name, those that were given. An integer may be one of NumPy.

    Raises:
        TypeError, ValueError: an option is unknown, or has the wrong type or value.
    """
    for name in given:
        if name not in OPTIONS:
            known = f"{', '.join(OPTIONS)}; got {name}{checks.suggested(name, OPTIONS)}"
            raise TypeError(f"{op}: options must be among {known}")
    return {name: OPTIONS[name].check(op, name, value) for name, value in given.items()}
