"""Batches of pairs by a budget of tokens."""

from .cost import CostModel
from .planning import StepPlanner
from .sampler import MicroBatch, TokenBudgetSampler, random_order

__all__ = [
    "CostModel",
    "MicroBatch",
    "StepPlanner",
    "TokenBudgetSampler",
    "random_order",
]
