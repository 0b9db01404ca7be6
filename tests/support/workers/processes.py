"""Runs a function on several ranks, in processes forked from a server that has imported TRL, or a launcher."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "peft", "trl.trainer.dpo_trainer"]
PRELOADED += ["fastdpo.ops", "fastdpo.models.forward"]  # nothing that refers to TRL, which some programs import anew
PROCESSES.set_forkserver_preload(PRELOADED)  # the workers of benchmarks share this server


def run_ranks(world: int, work: Callable, *args, seconds: float = 300) -> None:
    """Calls `work(*args)` in `world` processes with the environment variables of `torchrun`.

    `work` must be importable. All ranks are killed when one fails or after `seconds`.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [PROCESSES.Process(target=_rank, args=(rank, world, port, work, args)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + seconds
        while any(process.exitcode is None for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert codes == [0] * world, f"exit codes (None if killed): {codes}; tracebacks are in the captured stderr"


def run_launcher(command: Sequence[str], seconds: float, **options) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command that starts processes of its own, which are killed with it after `seconds`."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    ) as launcher:
        try:
            out, err = launcher.communicate(timeout=seconds)
        except BaseException:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, launcher.returncode, out, err)


def _rank(rank: int, world: int, port: int, work: Callable, args: tuple) -> None:
    addresses = dict(MASTER_ADDR="localhost", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank)
    sizes = dict(WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update({name: str(value) for name, value in {**addresses, **sizes}.items()})
    torch.set_num_threads(1)
    gc.freeze()  # trainings collect garbage, which takes long among all that is imported
    try:
        work(*args)
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # gloo workers that have imported transformers may abort while they shut down
