"""What tests share.

Its folders: `trl` has tiny trainings in TRL, recorded step by step; `programs` runs of real programs;
`workers` what one rank of several runs; `models` tiny models of many families; `stand_ins` what
replaces libraries that cannot run here; `ops` inputs of ops; `kernels` checks of Triton's interpreter;
`documents` generators of pages and tables.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The root of the repository."""
