"""ms-swift's CPOTrainer (CPO and SimPO), patched where it scores a batch (see `reference_free`)."""

import functools

from . import reference_free

_line = reference_free.line_of("CPOTrainer")
trainer_class = _line.trainer_class
unsupported_reason = _line.unsupported_reason
enable = functools.partial(reference_free.enable, _line)
disable = _line.disable
