"""Losses and sums over sequences for custom training loops."""
