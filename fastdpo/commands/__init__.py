"""The commands of `fastdpo`: check, doctor and run.

`fastdpo.__main__` parses their options. Nothing else in the library imports this package.
"""
