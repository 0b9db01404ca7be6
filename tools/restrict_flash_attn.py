"""Restricts the unpacked sources of flash-attn 2.8 to what fastdpo calls, so that they compile in minutes.

Usage: `python tools/restrict_flash_attn.py DIRECTORY`, or `make gpu-flash-attn`.

What is left: bfloat16, head sizes up to 64 and from 97 to 128, forward and backward, with and without windows and
softcap. Every other instantiation that the dispatcher names becomes a stub that raises an error: float16, other head
sizes, and keys that are split between programs, for decoding. So do dropout and ALiBi. For head sizes of which the
dispatcher makes 96, pad to 128.
"""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

DTYPE, HEAD_DIMS = "cutlass::bfloat16_t", (64, 128)
FUNCTIONS = "run_mha_fwd_", "run_mha_bwd_"
FLAGS = '"-DFLASHATTENTION_DISABLE_DROPOUT", "-DFLASHATTENTION_DISABLE_ALIBI"'
SOURCES, STUBS = "csrc/flash_attn/src", "csrc/flash_attn/stubs.cpp"
STUB = """template<> void {name}<{dtype}, {d}, {causal}>({params} &params, cudaStream_t stream) {{
    TORCH_CHECK(false, "flash-attn was built without {name}<{dtype}, {d}, {causal}>");
}}
"""
HEADER = """#include <c10/util/Exception.h>
#include <cutlass/numeric_types.h>

#include "namespace_config.h"
#include "flash.h"

namespace FLASH_NAMESPACE {

"""


class Instantiation(NamedTuple):
    """Template arguments of a function that launches kernels."""

    name: str
    dtype: str
    d: int
    causal: str

    @property
    def is_kept(self) -> bool:
        return self.name in FUNCTIONS and self.dtype == DTYPE and self.d in HEAD_DIMS


def dispatched(sources: Path) -> set[Instantiation]:
    """Every instantiation that the code of the extension may call: the product of its switches."""
    api = (sources / "csrc/flash_attn/flash_api.cpp").read_text()
    names = set(re.findall(r"(run_mha_\w+)<elem_type, kHeadDim, Is_causal>", api))
    switches = (sources / SOURCES / "static_switch.h").read_text()
    dtypes = re.findall(r"using elem_type = (cutlass::\w+);", switches)
    head_dims = map(int, re.findall(r"kHeadDim = (\d+);", switches))
    return {Instantiation(*x) for x in product(names, dtypes, [*head_dims], ("false", "true"))}


def instantiated(text: str) -> set[Instantiation]:
    """The instantiations that a source file defines."""
    found = re.findall(r"^template(?:<>)?\s+void (run_mha_\w+)<(cutlass::\w+), (\d+), (true|false)>\(", text, re.M)
    return {Instantiation(name, dtype, int(d), causal) for name, dtype, d, causal in found}


def restrict(sources: Path) -> None:
    """Changes the sources in place.

    Raises:
        ValueError: their setup.py is not that of flash-attn 2.8.
    """
    setup = sources / "setup.py"
    text = setup.read_text()
    files = re.findall(rf'^ +"({SOURCES}/\w+\.cu)",\n', text, re.M)
    kept = [x for x in files if all(found.is_kept for found in instantiated((sources / x).read_text()))]
    flags = (r'("-std=c\+\+17",\n)', r'(compiler_c17_flag=\["-O3", "-std=c\+\+17")\]')
    if len(files) < len(kept) * 2 or not kept or not all(re.search(flag, text) for flag in flags):
        raise ValueError(f"restrict_flash_attn: DIRECTORY must be the sources of flash-attn 2.8; got {sources}")
    text = re.sub(flags[0], rf"\1    {FLAGS},\n", text, count=1)
    text = re.sub(flags[1], rf"\1, {FLAGS}]", text, count=1)
    for file in set(files) - set(kept):
        text = re.sub(rf'^ +"{file}",\n', "", text, flags=re.M)
    text = text.replace('"csrc/flash_attn/flash_api.cpp",', f'"csrc/flash_attn/flash_api.cpp",\n"{STUBS}",', 1)
    setup.write_text(text)
    stubs = []
    for x in sorted(y for y in dispatched(sources) if not y.is_kept):
        params = "Flash_bwd_params" if "bwd" in x.name else "Flash_fwd_params"
        stubs.append(STUB.format(**x._asdict(), params=params))
    (sources / STUBS).write_text(f"{HEADER}{''.join(stubs)}\n}}  // namespace FLASH_NAMESPACE\n")


if __name__ == "__main__":
    restrict(Path(sys.argv[1]))
