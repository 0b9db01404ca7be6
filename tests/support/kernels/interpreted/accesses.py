"""Checks every load and store of kernels in Triton's interpreter.

An access must lie within the storage of one argument, and no program may access an element that
another program writes. The interpreter runs programs one after another, so a race, which a GPU may
decide either way, always gives the same result here.
"""

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

NOBODY, SEVERAL = 0, -1  # in place of a program's number


class Accesses:
    """The programs that accessed each element of one argument's storage, by the element's first byte."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.start, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.writers = np.zeros(storage.nbytes(), np.int32)
        self.readers = np.zeros(storage.nbytes(), np.int32)

    def record(self, addresses: np.ndarray, program: int, writes: bool) -> bool:
        """Records accesses of a program. Returns whether they race with those of another program."""
        elements = addresses - self.start
        writers, readers = self.writers[elements], self.readers[elements]
        if writes:
            self.writers[elements] = program
            return bool(_others(writers, program).any() or _others(readers, program).any())
        self.readers[elements] = np.where(_others(readers, program), SEVERAL, program)
        return bool(_others(writers, program).any())


def _others(programs: np.ndarray, program: int) -> np.ndarray:
    return (programs != NOBODY) & (programs != program)


def install(monkeypatch) -> None:
    """Makes the interpreter raise an AssertionError, or an error that contains it, for a wrong access."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    call = GridExecutor.__call__
    launched: dict[int, Accesses] = {}
    name = ""

    def check(builder, pointers, mask, access):
        visible = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.int64)
        if not visible.size:
            return
        first, last = visible.min(), visible.max() + max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        (x, y, z), (_, y_size, z_size) = builder.grid_idx, builder.grid_dim
        for accesses in launched.values():
            if accesses.start <= first and last <= accesses.end:
                races = accesses.record(visible, 1 + (x * y_size + y) * z_size + z, access == "store")
                assert not races, f"{name}: a {access} of program {(x, y, z)} races with another program"
                return
        raise AssertionError(f"{name}: a {access} of program {(x, y, z)} is outside of all arguments")

    def create_masked_load(builder, pointers, mask, *rest, **options):
        check(builder, pointers, mask, "load")
        return load(builder, pointers, mask, *rest, **options)

    def create_masked_store(builder, pointers, value, mask, *rest, **options):
        check(builder, pointers, mask, "store")
        return store(builder, pointers, value, mask, *rest, **options)

    def launch(executor, *args, **kwargs):
        nonlocal name
        name = executor.fn.__name__
        storages = [x.untyped_storage() for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        launched.clear()
        launched.update({x.data_ptr(): Accesses(x) for x in storages})
        call(executor, *args, **kwargs)

    def atomic(*_, **__):
        raise NotImplementedError("atomic operations are not checked for races")

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", atomic)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_cas", atomic)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
