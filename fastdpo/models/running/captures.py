"""Captures of CUDA graphs, and the memory that they share."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch

from ...ops import memory
from ...ops.memory import MemoryReport

T = TypeVar("T")


class Memory:
    """Memory of a device for what recordings compute. They share it, because no two of them need it at the same time.

    Attributes:
        device: which may be another one than the current device.
        pool: of the allocator, for as long as there are graphs.
        graphs: those that use it. The allocator takes no more of them for a pool that had none left.
        owner: the replay whose activations it holds.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None
        self.graphs: WeakSet[Any] = WeakSet()
        self.owner: object = None


@functools.cache
def memory_of(device: torch.device, has_backward: bool) -> Memory:
    """Recordings with a backward have their own: a reference runs between forward and backward of a policy."""
    return Memory(device)


def has_room(device: torch.device) -> bool:
    """Whether a recording would leave a device as much memory as the largest batch has taken so far, and a twentieth of
    all: a batch that runs the layers later cannot use what a recording holds, with activations that its call has kept.
    """
    now = cast(MemoryReport, memory.report(device))
    peak, spared = memory.spared.get(device, (0, 0.0))
    taken = now.peak - now.used - (spared if peak == now.peak else 0.0)
    free = now.total - now.others - torch.cuda.memory_reserved(device) + _bytes_of_pools(device)[0] - now.used
    return free > 2 * taken + memory.most_held(device, "activations") + now.total / 20


def note_recordings(device: torch.device, number: int) -> None:
    """Takes note of what so many recordings hold."""
    memory.hold(device, "recordings", _bytes_of_pools(device)[1], f"{number} CUDA graphs")


def _bytes_of_pools(device: torch.device) -> tuple[int, int]:
    """The bytes that the allocator has in its default pool, and those in others."""
    sizes = [0, 0]
    for x in torch.cuda.memory_snapshot():
        if x["device"] == device.index:
            sizes[tuple(x.get("segment_pool_id", (0, 0))) != (0, 0)] += x["total_size"]
    return sizes[0], sizes[1]


def record(run: Callable[[], T], memory: Memory) -> tuple[Callable[[], None], T]:
    """Records what a function launches, without running it. Returns a function that replays it, and what the function
    has returned.
    """
    with torch.cuda.device(memory.device), torch.cuda.stream(torch.cuda.current_stream(memory.device)):
        return _record(run, memory)  # where a capture cannot be ended, its stream stays the current one


def _record(run: Callable[[], T], memory: Memory) -> tuple[Callable[[], None], T]:
    if not memory.graphs:
        memory.pool = torch.cuda.graph_pool_handle()
    device, graph = torch.cuda.current_device(), torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device]
    random_state, collects = generator.clone_state(), gc.isenabled()
    gc.disable()  # what it frees may be a graph, or an event
    try:
        with torch.cuda.graph(graph, pool=memory.pool, capture_error_mode="thread_local"):
            result = run()
    except Exception:
        generator.graphsafe_set_state(random_state)
        with suppress(RuntimeError):  # raised if the capture was ended, which gives the memory back
            torch._C._cuda_endAllocateToPool(device, memory.pool)
            torch._C._cuda_releasePool(device, memory.pool)
        memory.graphs = WeakSet()  # the next capture takes another pool
        raise
    finally:
        if collects:
            gc.enable()
    memory.graphs.add(graph)
    return graph.replay, result
