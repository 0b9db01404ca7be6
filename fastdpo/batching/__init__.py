"""Batches of pairs by a budget of tokens."""

from .cost import CostModel
from .kinship import Kinship, kinship_of
from .planning import StepPlanner
from .report import BudgetReport, budget_report
from .sampler import MicroBatch, TokenBudgetSampler, random_order

__all__ = [
    "BudgetReport",
    "CostModel",
    "Kinship",
    "MicroBatch",
    "StepPlanner",
    "TokenBudgetSampler",
    "budget_report",
    "kinship_of",
    "random_order",
]
