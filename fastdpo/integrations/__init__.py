"""Patches for trainers. `line.TrainerLine` is the base class of all lines, `registry.ENTRIES` lists them, and
each package has a folder. `patching` is what users call.
"""
