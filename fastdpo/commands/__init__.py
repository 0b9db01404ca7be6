"""The commands of `fastdpo`: check, doctor, estimate, run and tune.

`fastdpo.__main__` parses their options. Nothing else in the library imports this package.
"""
