"""Batches of pairs by a budget of tokens."""

from .cost import CostModel
from .order import group_prompts, random_order
from .planning import StepPlanner
from .report import BudgetReport, budget_report
from .sampler import MicroBatch, TokenBudgetSampler

__all__ = [
    "BudgetReport",
    "CostModel",
    "MicroBatch",
    "StepPlanner",
    "TokenBudgetSampler",
    "budget_report",
    "group_prompts",
    "random_order",
]
