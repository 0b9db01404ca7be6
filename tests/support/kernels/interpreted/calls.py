"""Makes calls of device functions in Triton's interpreter fast.

Each call of a function with `@triton.jit` from a kernel searches all of `triton.language` for what the
interpreter replaces, which takes longer than most functions. Here a launch does so once for all
functions that see the same modules of `triton.language`.
"""

import functools

import triton.language as tl
from triton.runtime import interpreter


def install(monkeypatch) -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    @functools.cache
    def seen_by(fn) -> frozenset[str]:
        return frozenset(x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core)

    def patch_once(fn):
        if seen_by(fn) in patched:
            return None  # the result of a call is not used
        patched.add(seen_by(fn))
        return patch(fn)

    def launch_with_nothing_patched(executor, *args, **kwargs):
        patched.clear()
        launch(executor, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_with_nothing_patched)
