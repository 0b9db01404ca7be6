"""Whether a model is as it was when it was examined.

structure.py     what its modules, parameters and configuration are, which is its identity
contents.py      what modules keep in their attributes
functions.py     what hooks and replaced forwards are, and where they come from
harmless.py      names of hooks, wrappers and attributes that outputs do not depend on
"""
