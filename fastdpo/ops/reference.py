"""The former name of `fastdpo.ops.definitions`, which works until version 0.2."""

import warnings

from .definitions import *  # noqa: F403

warnings.warn("fastdpo.ops.reference is now fastdpo.ops.definitions", FutureWarning, stacklevel=2)
