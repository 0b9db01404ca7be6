"""Global and shared memory, with the checks of every access."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from .formats import U8, U32, unsigned

NOBODY, SEVERAL = 0, -1  # in place of a program's number, which is at least 1
SEVERAL_WARPS = -1  # in place of a warp's number


class Fault(Exception):
    """What a GPU punishes or decides by chance."""


class Buffer:
    """The storage of one tensor, and the programs that accessed each of its elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.start, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.itemsize = tensor.itemsize
        self.writers, self.readers = np.zeros((2, -(-storage.nbytes() // self.itemsize)), np.int32)

    def record(self, offsets: np.ndarray, size: int, programs: np.ndarray, writes: bool) -> None:
        """Records accesses of `size` bytes at offsets [n] by programs [n], all at the same time."""
        count = max(1, size // self.itemsize)
        elements = ((offsets // self.itemsize)[:, None] + np.arange(count)).ravel()
        programs = np.repeat(programs, count)
        writers, readers = self.writers[elements], self.readers[elements]
        races = _others(writers, programs)
        if writes:
            self.writers[elements] = programs
            races |= _others(readers, programs) | _others(self.writers[elements], programs)
        else:
            self.readers[elements] = np.where(_others(readers, programs), SEVERAL, programs)
            together = elements[_others(self.readers[elements], programs)]
            self.readers[together] = SEVERAL
        if races.any():
            i = int(races.argmax())
            verb = "writes" if writes else "reads"
            raise Fault(f"program {programs[i] - 1} {verb} element {elements[i]}, a race with another program")


def _others(recorded: np.ndarray, programs: np.ndarray) -> np.ndarray:
    return (recorded != NOBODY) & (recorded != programs)


class GlobalMemory:
    """The storages of the tensors that a kernel was launched with, at their addresses in this process."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        buffers: dict[int, Buffer] = {}
        for x in tensors:
            buffer = buffers.setdefault(x.untyped_storage().data_ptr(), Buffer(x))
            if x.itemsize < buffer.itemsize:  # two views of a storage
                buffers[buffer.start] = Buffer(x)
        self.buffers = [x for x in buffers.values() if x.end > x.start]

    def load(self, addresses: np.ndarray, size: int, count: int, programs: np.ndarray) -> np.ndarray:
        """`count` numbers of `size` bytes from each address, as unsigned [n, count]."""
        result = np.empty((len(addresses), count), unsigned(size))
        for buffer, chosen in self._find(addresses, size * count):
            offsets = addresses[chosen] - buffer.start
            buffer.record(offsets, size * count, programs[chosen], writes=False)
            result[chosen] = _numbers(buffer.bytes, size)[(offsets // size)[:, None] + np.arange(count)]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray, programs: np.ndarray) -> None:
        """Writes unsigned values [n, count] to addresses [n]."""
        size, count = values.itemsize, values.shape[1]
        for buffer, chosen in self._find(addresses, size * count):
            offsets = addresses[chosen] - buffer.start
            buffer.record(offsets, size * count, programs[chosen], writes=True)
            _numbers(buffer.bytes, size)[(offsets // size)[:, None] + np.arange(count)] = values[chosen]

    def _find(self, addresses: np.ndarray, size: int) -> list[tuple[Buffer, np.ndarray | slice]]:
        """The buffers, and which of the addresses lie in each."""
        if len(addresses) == 0:
            return []
        check_alignment(addresses, size)
        first, last = addresses.min(), addresses.max() + size
        for buffer in self.buffers:
            if buffer.start <= first and last <= buffer.end:
                return [(buffer, slice(None))]
        found, outside = [], np.ones(len(addresses), bool)
        for buffer in self.buffers:
            inside = (addresses >= buffer.start) & (addresses + size <= buffer.end)
            found += [(buffer, inside)] if inside.any() else []
            outside &= ~inside
        if outside.any():
            raise Fault(f"an access to {size} bytes at {addresses[outside][0]:#x} is outside of all arguments")
        return found


def _numbers(bytes_: np.ndarray, size: int) -> np.ndarray:
    return bytes_[: len(bytes_) // size * size].view(unsigned(size))


def check_alignment(addresses: np.ndarray, size: int) -> None:
    misaligned = addresses % size != 0
    if misaligned.any():
        raise Fault(f"an access to {size} bytes at {addresses[misaligned][0]:#x} is misaligned")


class SharedMemory:
    """The shared memory of a batch of programs. Positions are addresses plus the start of the program's part.

    Each word has two records: who wrote it last, and who read it last. A record holds the number of
    barriers that the program had passed, and the warp. Two warps race if they access a word between
    the same two barriers and one of them changes it.
    """

    PATTERN = 1024  # bytes after which every swizzle repeats: parts start at multiples of it
    WORD = U32.itemsize  # smaller accesses are not recorded
    WARPS = 64  # more than a program has

    def __init__(self, programs: int, size: int) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // self.PATTERN) * self.PATTERN
        self.bytes = np.full(programs * self.stride, 0xFF, U8)
        self._barriers = np.ones(programs, int)  # that each program has passed
        self._writers, self._readers = np.zeros((2, programs * self.stride // self.WORD), int)

    def pass_barrier(self, programs: np.ndarray) -> None:
        self._barriers[programs] += 1

    def positions(self, programs: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """Positions of accesses to `size` bytes at addresses [n] by programs [n] of the batch."""
        if len(addresses) and not (addresses.min() >= 0 and addresses.max() + size <= self.size):
            raise Fault(f"an access to {size} bytes at {addresses.max()} is outside of {self.size} bytes shared memory")
        check_alignment(addresses, size)
        return programs * self.stride + addresses

    def load(self, positions: np.ndarray, size: int, count: int, warps: np.ndarray | int) -> np.ndarray:
        """`count` numbers of `size` bytes from positions [n], read by warps [n], as unsigned [n, count]."""
        if size * count >= self.WORD:
            words = self._words(positions, size * count)
            access = self._accesses(words, warps)
            if _differ(self._writers[words], access).any():
                raise Fault("warps race in shared memory")
            self._readers[words] = np.where(_differ(self._readers[words], access), access | self.WARPS - 1, access)
            self._readers[words[_differ(self._readers[words], access)]] |= self.WARPS - 1  # at the same time
        return self.bytes.view(unsigned(size))[(positions // size)[:, None] + np.arange(count)]

    def store(self, positions: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """Writes unsigned values [n, count] to positions [n] by warps [n]."""
        size = values.itemsize * values.shape[1]
        values = np.ascontiguousarray(values).view(U32 if size >= self.WORD else values.dtype)
        memory = self.bytes.view(values.dtype)
        places = (positions // values.itemsize)[:, None] + np.arange(values.shape[1])
        if size >= self.WORD:
            changed = memory[places] != values
            self._claim(places[changed], np.repeat(warps, changed.sum(1)))
        memory[places] = values
        if (memory[places] != values).any():
            raise Fault("threads race in shared memory")

    def claim(self, positions: np.ndarray, size: int, warps: np.ndarray) -> None:
        """Records that warps [n] will write `size` bytes at positions [n]."""
        words = self._words(positions, size)
        self._claim(words.ravel(), np.repeat(warps, words.shape[1]))

    def _claim(self, words: np.ndarray, warps: np.ndarray) -> None:
        """Records writes. Several warps may write a word at the same time, as they do where its value is replicated."""
        access = self._accesses(words, warps)
        if (_differ(self._writers[words], access) | _differ(self._readers[words], access)).any():
            raise Fault("warps race in shared memory")
        self._writers[words] = access
        self._writers[words[_differ(self._writers[words], access)]] |= self.WARPS - 1

    def _words(self, positions: np.ndarray, size: int) -> np.ndarray:
        return (positions // self.WORD)[:, None] + np.arange(size // self.WORD)

    def _accesses(self, words: np.ndarray, warps: np.ndarray | int) -> np.ndarray:
        """Records of accesses to words, [n] or [n, count], by warps [n]."""
        barriers = self._barriers[words * self.WORD // self.stride]
        return barriers * self.WARPS + np.reshape(warps, (-1, *[1] * (words.ndim - 1))) % self.WARPS


def _differ(records: np.ndarray, accesses: np.ndarray) -> np.ndarray:
    """Whether records are of other warps, between the same two barriers."""
    return (records // SharedMemory.WARPS == accesses // SharedMemory.WARPS) & (records != accesses)
