"""Keeps interpreted and compiled tests apart: Triton decides between them at import."""

import os

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_census.py", "test_interpreted.py"] if interpreted else ["interpreted"]
