"""Triton decides once, at import, whether it compiles or interprets: each kind of test has a process of its own."""

import os

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_census.py", "test_interpreted.py"] if interpreted else ["interpreted"]
