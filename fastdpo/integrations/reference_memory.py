"""What a reference gave each pair, remembered by the pair's content: what the trainers' memories have in common."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .fingerprints import Fingerprint, fingerprint
from .fused_forward import calls, logger, say_off
from .structure import Structure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"high": "I64", "low": "I64", "chosen": "F64", "rejected": "F64"}
"""Of files: the two halves of a pair's hash, and its log-probabilities in nats."""

Pair = tuple[float, float]


class Memory:
    """Of one trainer.

    Ranks remember for themselves, and tell each other in `share`.

    Args:
        option: False: nothing is remembered. True: for as long as the trainer lives. A directory: beyond that.
        integration: whose calls are counted and who is named in logs.
    """

    def __init__(self, option: bool | Path, integration: str):
        self.on, self._directory = option is not False, option if isinstance(option, Path) else None
        self._integration = integration
        self.begun = False
        self._make_key: Callable[[], str] = str
        self._key = ""
        self._of: Fingerprint | None = None  # what the values are of
        self._structure = Structure()
        self._changed = False
        self._values: dict[bytes, Pair] = {}
        self._new: dict[bytes, Pair] = {}

    def begin(self, reason: str | None, key: Callable[[], str]) -> None:
        """Turns it off if there is a reason to; else reads what the directory has under the key.

        `key` makes a hash of all that a pair's log-probabilities depend on beside its content. It is called again when
        the reference has changed.
        """
        self.begun, self._make_key = True, key
        if reason is not None:
            self.turn_off(reason)
        else:
            self._read()

    def turn_off(self, reason: str) -> None:
        self.on, self._values, self._new = False, {}, {}
        say_off(f"{self._integration}: reference_memory is off, {reason}")

    def log_probs(
        self, reference: PreTrainedModel, digests: list[bytes], compute: Callable[[list[int]], Tensor]
    ) -> Tensor:
        """[B, 2] float64, chosen and rejected, of pairs with these digests. To be called after `check`.

        `compute` is called with the indices of pairs that are new, if any are, and returns [M, 2]. If it draws random
        numbers, the memory is turned off.
        """
        if any(module.training for module in reference.modules()):  # its numbers may be others than in evaluation
            digests = [hashlib.blake2b(x, digest_size=len(x), person=b"training").digest() for x in digests]
        missing = [i for i, digest in enumerate(digests) if digest not in self._values]
        found: dict[bytes, Pair] = {}
        if missing:
            before = _random_states(reference.device)
            computed = compute(missing).double().tolist()
            found = {digests[i]: (chosen, rejected) for i, (chosen, rejected) in zip(missing, computed, strict=True)}
            known = [found.get(x) or self._values[x] for x in digests]
            if not all(map(torch.equal, before, _random_states(reference.device))):
                self.turn_off("it draws random numbers (dropout, noise or jitter)")
            if self.on:
                finite = {digest: pair for digest, pair in found.items() if all(map(math.isfinite, pair))}
                self._values |= finite
                self._new |= finite
        else:
            calls[self._integration, "reference", "remembered"] += 1
            known = [self._values[x] for x in digests]
        return torch.tensor(known, dtype=torch.float64)

    def share(self) -> None:
        """Tells the other ranks what is new, and writes it to the directory.

        Every rank must call this, whether its memory is on or not.
        """
        from ..ref_logps.passes import of_all_ranks

        tensors = None if self._of is None else self._of.tensors
        for others_tensors, new in of_all_ranks((tensors, self._new)):
            if self.on and others_tensors == tensors:
                self._values |= new
        self._write()

    def check(self, reference: PreTrainedModel) -> None:
        """Clears the memory if the reference, as it would run now, has changed since the last call."""
        try:
            found = fingerprint(reference, self._structure)
        except (RuntimeError, NotImplementedError) as error:
            self.turn_off(f"the reference's tensors can't be read: {error}")
            return
        if self._of is not None and found != self._of:
            self._drop()
        self._of = found

    def _drop(self) -> None:
        self._write()
        level = logging.INFO if self._changed else logging.WARNING
        logger.log(level, "%s: the reference has changed; what reference_memory held is dropped", self._integration)
        self._changed = True
        self._values, self._new = {}, {}
        self._read()

    def _read(self) -> None:
        """Reads the values stored under the key. Continues in RAM if there is no key or the directory is unusable."""
        from ..ref_logps import shards

        if self._directory is None:
            return
        try:
            self._key = self._make_key()
        except NotImplementedError as error:
            self._keep_in_ram(str(error))
            return
        directory = self._directory / self._key
        try:
            self._values = _read(directory, self._key)
        except (ValueError, OSError) as error:
            if not self._changed:  # at the start: nothing is lost yet
                raise
            self._keep_in_ram(str(error))
            return
        reason = shards.unusable(directory)
        if reason is None:
            shards.remove_leftovers(directory)
        else:
            self._keep_in_ram(reason)

    def _write(self) -> None:
        if self._directory is not None and self._new:
            try:
                _write(self._directory / self._key, self._key, self._new)
            except OSError as error:
                self._keep_in_ram(f"a file can't be written: {error}")
        self._new = {}

    def _keep_in_ram(self, reason: str) -> None:
        self._directory = None
        logger.warning("%s: reference_memory is kept in RAM, not on disk: %s", self._integration, reason)


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the random number generators that a model on this device uses."""
    on_host = torch.get_rng_state()
    return [on_host, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [on_host]


def digests_of_pairs(ids: Tensor, mask: Tensor, scored: Tensor) -> list[bytes]:
    """16 bytes for each pair: its real tokens and which of them are scored. One copy to the host.

    All are [2B, L], chosen rows first; `mask` is 0 where padded, `scored` 0 where a token is not scored.
    """
    host_ids, real, host_scored = torch.stack([ids.long(), mask.long(), scored.long()]).cpu().numpy()
    n_pairs = len(ids) // 2
    found = []
    for pair in range(n_pairs):
        digest = hashlib.blake2b(digest_size=16)
        for row in (pair, pair + n_pairs):
            kept = real[row] != 0
            digest.update(kept.sum().tobytes() + host_ids[row][kept].tobytes())
            digest.update((host_scored[row][kept] != 0).tobytes())
        found.append(digest.digest())
    return found


def key_of(*parts: object) -> str:
    from ..ref_logps import keys

    return hashlib.sha256(repr((keys.VERSION, "by content", *parts)).encode()).hexdigest()


def _write(directory: Path, key: str, values: dict[bytes, Pair]) -> None:
    from ..ref_logps import shards

    halves = torch.from_numpy(np.frombuffer(b"".join(values), dtype=np.int64).copy()).view(-1, 2)
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    columns = (*halves.unbind(1), *numbers.unbind(1))
    shards.write_file(directory, key, {name: x.contiguous() for name, x in zip(DTYPES, columns, strict=True)})


def _read(directory: Path, key: str) -> dict[bytes, Pair]:
    """Of all files. ValueError if one is not what `_write` has made for this key."""
    from ..ref_logps import shards

    values: dict[bytes, Pair] = {}
    for path in shards.files(directory):
        high, low, chosen, rejected = shards.read_file(path, key, DTYPES).values()
        digests = torch.stack([high, low], 1).numpy()
        numbers = zip(chosen.tolist(), rejected.tolist(), strict=True)
        values.update((digest.tobytes(), pair) for digest, pair in zip(digests, numbers, strict=True))
    return values
