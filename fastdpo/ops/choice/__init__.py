"""Which kernel runs: each is tried on a small case before its first use, and alternatives are timed.

`verdicts` keeps what passed, `tuning` what was fastest, and `notes` both in a file for later processes.
"""
