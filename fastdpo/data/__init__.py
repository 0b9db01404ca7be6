"""Preference datasets: reading files and columns, tokenized pairs and their batches.

Nothing in this package knows of a model or a trainer.
"""
