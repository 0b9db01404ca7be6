"""Bounds on the time of the kernels, from their machine code and figures of devices. Nothing is run."""
