"""Remembers the reference's log-probabilities of each pair by the pair's tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from .. import storage
from ..distributed import gather_objects, largest_of_ranks, raising_on_all
from ..logs import logger, report, warn
from ..models import calls
from ..models.structure import Structure
from ..models.support import rope_reason
from ..reasons import Reason
from . import shards
from .fingerprint import Fingerprint, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pair = tuple[float, float]

T = TypeVar("T")


REMEMBERED, MISSING, CHANGED, DISABLED = range(4)
"""The votes of ranks on a batch: what one of them knows about it. The largest vote of any rank decides for all. Only
one may hold the shard of the reference that has changed."""


class Memory:
    """The reference memory of one trainer. Each rank has its own, and `exchange` merges them.

    Ranks that hold shards of the reference can only run it together. They vote in every batch: all
    of them run it if one rank needs to, and all memories are cleared or disabled with the first.

    Args:
        option: False disables it. True keeps values for the lifetime of the trainer, the path of a
            directory beyond it.
        integration: name under which calls are counted and logged.
    """

    def __init__(self, option: bool | str, integration: str):
        self.enabled = option is not False
        self.started = False
        self._directory = Path(option) if isinstance(option, str) else None
        self._integration = integration
        self._make_key: Callable[[], str] = str
        self._key = ""
        self._fingerprint: Fingerprint | None = None  # of the reference that gave the values
        self._structure = Structure()
        self._reference_has_changed = False
        self._values: dict[bytes, Pair] = {}
        self._new: dict[bytes, Pair] = {}
        self._vote_on: torch.device | None = None
        self._changed = False
        self._disabling: Reason | None = None  # until the next vote

    def start(
        self, unsupported_reason: Reason | None, key: Callable[[], str], vote_on: torch.device | None = None
    ) -> None:
        """Disables the memory if there is a reason to, and otherwise reads the values in the
        directory.

        Args:
            unsupported_reason: why this reference's log-probabilities cannot be remembered, or
                None.
            key: returns a hash of everything that they depend on next to a pair's tokens. It is
                called again when the reference has changed.
            vote_on: the device of the ranks' collective if they hold shards of the reference, or
                None. If given, every rank must make the same calls.
        """
        self.started, self._make_key, self._vote_on = True, key, vote_on
        reason = next(filter(None, self._of_voters(unsupported_reason)), None)
        if reason is not None:
            self._disable(reason)
        else:
            self._read()

    def disable(self, reason: Reason) -> None:
        """Disables the memory. That of ranks that vote stays enabled until their next vote."""
        if self._vote_on is None:
            self._disable(reason)
        else:
            self._disabling = self._disabling or reason

    def _disable(self, reason: Reason) -> None:
        self.enabled, self._values, self._new = False, {}, {}
        report(f"{self._integration}: reference_memory is disabled, {reason.named}")

    def log_probs(
        self, reference: PreTrainedModel, digests: list[bytes], compute: Callable[[list[int]], Tensor], tokens: int
    ) -> Tensor | None:
        """Returns the log-probabilities of chosen and rejected completions, float64 [B, 2]. None if
        the memory is disabled, on all ranks if they vote. Call `check` first.

        Args:
            reference: the model that `compute` runs.
            digests: of the B pairs (see `digests_of_pairs`). Empty after `disable`.
            compute: given the indices of M pairs, returns their values [M, 2]. It is called for
                those that are not remembered, and for one pair that is when only another rank needs
                to run the reference. If it draws random numbers, the memory is disabled.
            tokens: number of tokens in the padded batch.
        """
        modules = self._structure.modules_of(reference, nn.Module)
        if any(module.training for module in modules):  # values may differ from those in evaluation mode
            digests = [hashlib.blake2b(x, digest_size=len(x), person=b"training").digest() for x in digests]
        others_run = self._vote(digests)
        if not self.enabled:
            return None
        missing = [i for i, digest in enumerate(digests) if digest not in self._values]
        run = missing or ([0] if others_run else [])
        calls.count_tokens(self._integration, tokens * (len(digests) - len(run)) // len(digests), 0, 0)
        if run:
            before = _random_states(reference.device)
            computed = compute(run).double().tolist()
            new: dict[bytes, Pair] = {digests[i]: (pair[0], pair[1]) for i, pair in zip(run, computed, strict=True)}
            values = [self._values.get(digest) or new[digest] for digest in digests]
            if not all(map(torch.equal, before, _random_states(reference.device))):
                self.disable(Reason("random-reference"))
            if self.enabled and self._disabling is None:
                finite = {digests[i]: new[digests[i]] for i in missing if all(map(math.isfinite, new[digests[i]]))}
                self._values |= finite
                self._new |= finite
        else:
            calls.calls[self._integration, "reference", "remembered"] += 1
            values = [self._values[digest] for digest in digests]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def _vote(self, digests: list[bytes]) -> bool:
        """Whether a rank runs the reference for this batch. Clears or disables the memory if that of
        any rank must be. One collective if ranks vote, otherwise False.
        """
        if self._vote_on is None:
            return False
        if self._disabling is not None:
            vote = DISABLED
        elif self._changed:
            vote = CHANGED
        else:
            vote = REMEMBERED if digests and self._values.keys() >= set(digests) else MISSING
        decision = int(largest_of_ranks(torch.tensor(vote, device="cpu"), self._vote_on))
        if decision == DISABLED:
            self._disable(next(filter(None, gather_objects(self._disabling))))
        elif decision == CHANGED:
            self._clear()
        self._changed = False
        return decision != REMEMBERED

    def _of_voters(self, x: T) -> list[T]:
        """What each rank passes, or only `x` if ranks do not vote."""
        return [x] if self._vote_on is None else gather_objects(x)

    def exchange(self) -> None:
        """Merges the new values of all ranks, and writes this rank's to the directory.

        Every rank must call this, whether its memory is enabled or not.
        """
        voting = self._vote_on is not None  # then the memories are of the same reference, and fingerprints of shards
        tensors = None if voting or self._fingerprint is None else self._fingerprint.tensors
        for tensors_of_rank, new_of_rank in gather_objects((tensors, self._new)):
            if self.enabled and tensors_of_rank == tensors:
                self._values |= new_of_rank
        self._write()

    def check(self, reference: PreTrainedModel, width: int) -> None:
        """Clears the memory if the reference, as it would run now, has changed since the last call, and
        disables it if what the reference computes depends on the width of the batch.

        That of ranks that vote is cleared or disabled by their next vote.
        """
        reason = rope_reason(reference, width)
        if reason is not None:
            self.disable(reason)
            return
        try:
            current = fingerprint(reference, self._structure)
        except (RuntimeError, NotImplementedError) as error:
            self.disable(Reason("unreadable-reference", error=error))
            return
        if self._fingerprint is not None and current != self._fingerprint:
            self._changed = self._vote_on is not None
            if not self._changed:
                self._clear()
        self._fingerprint = current

    def _clear(self) -> None:
        self._write()
        message = f"{self._integration}: the reference has changed; reference_memory is cleared"
        if self._reference_has_changed:
            logger.info("fastdpo: %s", message)
        else:
            warn(message)
        self._reference_has_changed = True
        self._values, self._new = {}, {}
        self._read()

    def _read(self) -> None:
        """Reads the values stored under the key. Continues in RAM if there is
        no key or the directory is unusable.
        """
        if not any(self._of_voters(self._directory is not None)):
            return
        try:
            self._key = self._make_key()  # by all ranks that vote, since it may read all shards
        except NotImplementedError as error:
            self._keep_in_ram(Reason("no-key", error=error))
            return
        directory = None if self._directory is None else self._directory / self._key

        def read() -> dict[bytes, Pair]:
            return {} if directory is None else shards.read_by_content(directory, self._key)

        try:
            self._values = read() if self._vote_on is None else raising_on_all(read, ValueError, OSError)
        except (ValueError, OSError) as error:
            if not self._reference_has_changed:  # at the start, when raising loses no work
                raise
            self._keep_in_ram(Reason("cache-file", done="read", error=error))
            return
        if directory is None:
            return
        reason = storage.unusable_reason(directory)
        if reason is None:
            storage.remove_leftovers(directory)
        else:
            self._keep_in_ram(reason)

    def _write(self) -> None:
        if self._directory is not None and self._new:
            try:
                shards.write_by_content(self._directory / self._key, self._key, self._new)
            except OSError as error:
                self._keep_in_ram(Reason("cache-file", done="written", error=error))
        self._new = {}

    def _keep_in_ram(self, reason: Reason) -> None:
        self._directory = None
        warn(f"{self._integration}: reference_memory is kept in RAM, not on disk: {reason.named}")


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the random number generators that a model on this device uses."""
    cpu = torch.get_rng_state()
    return [cpu, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [cpu]


def digests_of_pairs(ids: Tensor, mask: Tensor, scored: Tensor, contents: Sequence[bytes] | None = None) -> list[bytes]:
    """Digests of 16 bytes of each pair's real tokens and which of them are scored. One copy to the
    host.

    Args:
        ids: [2B, L], chosen rows first.
        mask: [2B, L], 0 at padding.
        scored: [2B, L], 0 where a token is not scored.
        contents: what each of the 2B rows has besides tokens.
    """
    host_ids, real, host_scored = torch.stack([ids.long(), mask.long(), scored.long()]).cpu().numpy()
    n_pairs = len(ids) // 2
    digests = []
    for pair in range(n_pairs):
        digest = hashlib.blake2b(digest_size=16)
        for row in (pair, pair + n_pairs):
            kept = real[row] != 0
            digest.update(kept.sum().tobytes() + host_ids[row][kept].tobytes())
            digest.update((host_scored[row][kept] != 0).tobytes())
            if contents is not None:
                digest.update(contents[row])
        digests.append(digest.digest())
    return digests


def key_of(*parts: object) -> str:
    """The key under which files store the values of a reference."""
    from . import keys

    return hashlib.sha256(repr((keys.VERSION, "by content", *parts)).encode()).hexdigest()
