"""The options that a trainer is patched with, and those of its own with which it cannot be fused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .. import checks
from ..reasons import Reason

if TYPE_CHECKING:
    from ..models.running import Compile


class PatchOptions(NamedTuple):
    """The options of `patch()`, which explains them. Trainers that are created later use them."""

    share_prompts: bool = True
    max_tokens: int | Literal["own", "auto"] | None = "own"
    compile: Compile = "auto"
    verify: bool = False

    def checked(self, op: str) -> PatchOptions:
        """These options, where an integer of NumPy is one of Python.

        Args:
            op: the public function, for its error messages.

        Raises:
            TypeError, ValueError: an option has the wrong type or value.
        """
        tokens = self.max_tokens
        checks.require_flags(op, share_prompts=self.share_prompts, verify=self.verify)
        require_compile(op, self.compile)
        if tokens is None or (isinstance(tokens, str) and tokens in ("own", "auto")):
            return self
        checks.require_integer(op, "max_tokens", tokens, rule := 'be a positive integer, "own", "auto" or None')
        checks.require(int(tokens) > 0, op, "max_tokens", rule, tokens)
        return self._replace(max_tokens=int(tokens))

    def given(self) -> dict[str, object]:
        """By name, the options that are not defaults."""
        return {name: x for name, x in self._asdict().items() if x != self._field_defaults[name]}


def require_compile(op: str, value: object) -> None:
    """Raises TypeError unless a value is one of the option `compile`."""
    is_valid = isinstance(value, bool) or (isinstance(value, str) and value == "auto")
    checks.require(is_valid, op, "compile", 'be True, False or "auto"', repr(value), error=TypeError)


def liger_reason(config: Any) -> Reason | None:
    """Why a trainer with this configuration cannot be fused: Liger replaces its head or its loss."""
    return option_reason(config, ("use_liger_loss", "use_liger_kernel"))


def option_reason(config: Any, options: Iterable[str]) -> Reason | None:
    """Why a trainer with this configuration cannot be fused: the first of these options that is set."""
    set_ones = (name for name in options if getattr(config, name, False))
    return next((Reason("incompatible-option", option=name) for name in set_ones), None)
