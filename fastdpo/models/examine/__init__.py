"""Examines a model: a few random rows, packed and padded, and the first calls, fused and by the prior forward."""
