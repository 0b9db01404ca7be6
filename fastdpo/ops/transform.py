"""The transform of the logits of a head, and of the scores of attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Transform(NamedTuple):
    """The transform `z = softcap * tanh(scale * x / softcap) / temperature` of raw logits x."""

    softcap: float | None
    scale: float
    temperature: float

    def apply_(self, x: Tensor) -> Tensor:
        """Transforms x in place, in its dtype."""
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x if self.temperature == 1.0 else x.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """`d z / d x` divided by the constant `gain`, computed from z; None where it is 1."""
        return None if self.softcap is None else 1 - (z * (self.temperature / self.softcap)).square()

    @property
    def gain(self) -> float:
        return self.scale / self.temperature
