"""LLaMA-Factory's trainers."""
