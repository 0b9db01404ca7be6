"""The commands of `fastdpo`: check, doctor, estimate and run.

`fastdpo.__main__` parses their options. Nothing else in the library imports this package.
"""
