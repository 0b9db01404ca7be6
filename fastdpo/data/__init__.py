"""Preference datasets: reading files and columns of token ids.

Nothing in this package knows of a model or a trainer.
"""
