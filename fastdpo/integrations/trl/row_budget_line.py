"""What the lines share of trainers whose steps `max_tokens` cuts on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .batches.row_budget import RowBudget
from .fused_head import FusedHeadLine


class RowBudgetLine(FusedHeadLine):
    """The line of such a trainer.

    Attributes:
        budget_class: what cuts the steps of one.
        replaced_with_budget: functions of the class that are replaced with `max_tokens` only.
    """

    budget_class: ClassVar[type[RowBudget]]
    replaced_with_budget: ClassVar[tuple[str, ...]] = ("training_step",)

    def replace(self) -> None:
        super().replace()
        if self.options.max_tokens is not None:
            for name in self.replaced_with_budget:
                self.wrap(name, getattr(self, name))

    def init(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().init(stock, trainer, *args, **kwargs)
        state, max_tokens = self.state_of(trainer), self.options.max_tokens
        if state is not None and max_tokens is not None:
            state.budget = self.budget_class(self.name, max_tokens, self.options.share_prompts)
            state.budget.install(trainer, self.trainer_class())

    def disable(self) -> None:
        budgets = [(trainer, self.budget_of(trainer)) for trainer in self.trainers()]
        super().disable()
        for trainer, budget in budgets:
            if budget is not None:
                budget.hand_back(trainer)

    def budget_of(self, trainer: Any) -> Any:
        """What cuts the steps of a trainer, or None."""
        return getattr(self.state_of(trainer), "budget", None)

    def training_step(
        self, stock: Callable, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        budget = self.budget_of(trainer)
        if budget is None:
            return stock(trainer, model, inputs, *args, **kwargs)
        return budget.training_step(trainer, model, inputs, lambda batch: stock(trainer, model, batch, *args, **kwargs))
