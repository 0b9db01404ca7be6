"""What a reference gave each pair, remembered by the pair's content: what the trainers' memories have in common."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .fused_forward import calls, say_off

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
        self._key = ""
        self._values: dict[bytes, Pair] = {}
        self._new: dict[bytes, Pair] = {}

    def begin(self, reason: str | None, key: Callable[[], str]) -> None:
        """Turns it off if there is a reason to; else reads what the directory has under the key.

        `key` makes a hash of all that a pair's log-probabilities depend on beside its content.
        """
        self.begun = True
        if reason is not None:
            self.turn_off(reason)
        elif self._directory is not None:
            self._key = key()
            self._values = _read(self._directory / self._key, self._key)

    def turn_off(self, reason: str) -> None:
        self.on = False
        say_off(f"{self._integration}: reference_memory is off, {reason}")

    def log_probs(self, digests: list[bytes], compute: Callable[[list[int]], Tensor]) -> Tensor:
        """[B, 2] float64, chosen and rejected, of pairs with these digests.

        `compute` is called with the indices of those that are new, if any are, and returns [M, 2].
        """
        missing = [i for i, digest in enumerate(digests) if digest not in self._values]
        found: dict[bytes, Pair] = {}
        if missing:
            computed = compute(missing).double().tolist()
            found = {digests[i]: (chosen, rejected) for i, (chosen, rejected) in zip(missing, computed, strict=True)}
            finite = {digest: pair for digest, pair in found.items() if all(map(math.isfinite, pair))}
            self._values |= finite
            self._new |= finite
        else:
            calls[self._integration, "reference", "remembered"] += 1
        return torch.tensor([found.get(x) or self._values[x] for x in digests], dtype=torch.float64)

    def share(self) -> None:
        """Tells the other ranks what is new, and writes it to the directory. Every rank must call this."""
        from ..ref_logps.passes import of_all_ranks

        for new in of_all_ranks(self._new):
            self._values |= new
        if self._directory is not None and self._new:
            _write(self._directory / self._key, self._key, self._new)
        self._new = {}


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
