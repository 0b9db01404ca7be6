"""The example of docs/distributed.md with the collectives of gloo: DeepSpeed compiles its own, for minutes."""

import runpy

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path("examples/distributed/train.py", run_name="__main__")
