"""Batches of pairs by a budget of tokens."""

from .cost import CostModel
from .kinship import Kinship, kinship_of
from .planning import StepPlanner
from .sampler import MicroBatch, TokenBudgetSampler, random_order

__all__ = [
    "CostModel",
    "Kinship",
    "MicroBatch",
    "StepPlanner",
    "TokenBudgetSampler",
    "kinship_of",
    "random_order",
]
