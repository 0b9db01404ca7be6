"""The former name of `fastdpo.ops.definitions`, which works until version 0.2."""

from ..logs import warn
from .definitions import *  # noqa: F403

warn("ops.reference is now fastdpo.ops.definitions")
