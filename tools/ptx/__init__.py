"""Executes PTX in NumPy, so that compiled kernels run without a GPU.

All threads of many programs run in lockstep, an instruction at a time. Where they diverge, those at
the earliest instruction run first. Copies and products that are asynchronous finish as late as they
may, when a thread waits for them, so a missing wait gives wrong results. A `Fault` is raised for
what a GPU punishes or decides by chance: an access outside of all arguments or misaligned, a race
between programs in global memory or between warps in shared memory, a barrier that only a part of a
program reaches, a wait without an end. Shared memory and registers that nothing has written hold NaN.

Not modelled: time, caches, fences, the rounding of approximate instructions, races within a warp and
those of accesses to less than four bytes of shared memory. An instruction or a modifier that is not
known raises `NotImplementedError` with its text.

    program.py       parses PTX
    machine.py       runs the threads of a batch of programs: registers, masks, branches
    instructions.py  the table of instructions
    arithmetic.py    numbers, comparisons, conversions, bits
    transfers.py     loads, stores, shuffles, ldmatrix and stmatrix
    asynchronous.py  cp.async
    products.py      mma.sync and wgmma
    memory.py        global and shared memory with their checks
    formats.py       types of numbers
    driver.py        the driver and the backend that make Triton launch here
    ops.py           the ops of fastdpo, which choose kernels as on that GPU
    plugin.py        the tests of the ops, with these kernels
"""
