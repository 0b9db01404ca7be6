"""Measures which kernels are fastest on this GPU for a model, and notes it for later trainings.

    fastdpo tune --model PATH [--tokens N ...] [--dtype bfloat16] [--frozen]
    fastdpo tune --hidden 896 --vocabulary 151936 [--dtype bfloat16] [--frozen]

A training measures the same at its first calls (`ops.tuning`). What is noted is not measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm

from .. import checks
from ..ops import linear_logps, packed_attention
from ..ops.attention import routes
from ..ops.choice import tuning
from ..ops.choice.tuning import Choice
from ..ops.choice.verdicts import Kernel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENS = (4096, 16384)
PROMPT, COMPLETION = 512, 256  # tokens, of the pairs for which attention is measured


class HeadSize(NamedTuple):
    """The size of an LM head."""

    hidden: int
    vocabulary: int


class AttentionSize(NamedTuple):
    """The size and options of a layer's attention."""

    heads: int
    key_heads: int
    head_size: int
    window: int | None
    softcap: float | None


def sizes_of(config: PretrainedConfig) -> tuple[HeadSize, list[AttentionSize]]:
    """The head and the kinds of attention of a model.

    Raises:
        ValueError: the configuration does not say the number of heads, or has other head sizes for
            values than for keys.
    """
    text: Any = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or getattr(text, "qk_rope_head_dim", None) is not None:
        raise ValueError(f"tune: the attention of {text.model_type} cannot be read from its configuration")
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    layers = getattr(text, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    windows = {window if kind == "sliding_attention" else None for kind in layers if "attention" in kind}
    softcap = getattr(text, "attn_logit_softcapping", None)
    kinds = [AttentionSize(heads, key_heads, size, x, softcap) for x in sorted(windows, key=lambda x: x or 0)]
    return HeadSize(text.hidden_size, text.vocab_size), kinds


def measured(
    head: HeadSize,
    attention: Sequence[AttentionSize],
    dtype: torch.dtype,
    frozen: bool,
    tokens: Sequence[int],
    device: torch.device,
    *,
    progress: bool = False,
) -> dict[Kernel, Choice]:
    """Makes the choices for a model on a device.

    Args:
        head: its LM head.
        attention: its kinds of attention.
        dtype: bfloat16 or float16, of hidden states and weights.
        frozen: whether the head is not trained.
        tokens: the numbers of packed tokens that attention is measured for.
        device: the GPU.
        progress: draw a progress bar.

    Returns:
        The choices, by the kind of call.

    Raises:
        ValueError: a number is too small, there is no GPU, or nothing may be measured on it.
    """
    for name, size in head._asdict().items():
        checks.require(size > 0, "tune", name, "be positive", size)
    for count in tokens:
        least = routes.LEAST_TUNED
        checks.require(count >= least, "tune", "tokens", "be at least {}", count, least)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("tune: no GPU found (torch.cuda.is_available() is False)")
    if not tuning.is_on(device):
        raise ValueError(f"tune: nothing is measured with {tuning.VARIABLE}=0 or deterministic algorithms")
    calls = 1 + len(attention) * len(tokens)
    with tqdm(total=calls, desc="Measuring kernels", unit=" calls", disable=not progress) as bar:
        weight = (torch.randn(head.vocabulary, head.hidden, device=device) * head.hidden**-0.5).to(dtype)
        weight.requires_grad_(not frozen)
        linear_logps(weight.detach()[:1], weight, torch.zeros(1, dtype=torch.int64, device=device))
        del weight
        bar.update()
        for size in attention:
            for count in tokens:
                query = torch.randn(count, size.heads, size.head_size, device=device).to(dtype)
                key = query[:, : size.key_heads]
                packed_attention(query, key, key, rows_of_pairs(count), window=size.window, softcap=size.softcap)
                bar.update()
    return tuning.made()


def rows_of_pairs(tokens: int) -> torch.Tensor:
    """Rows of a layout [S, 4]: pairs of completions that share a prompt, and a shorter pair at the end."""
    rows = []
    for start in range(0, tokens, PROMPT + 2 * COMPLETION):
        end = min(start + PROMPT + 2 * COMPLETION, tokens)
        prompt, chosen = ((end - start) * x // (PROMPT + 2 * COMPLETION) for x in (PROMPT, PROMPT + COMPLETION))
        rows += [[start, 0, start, chosen], [start, prompt, start + chosen, end - start - chosen]]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def as_text(choices: dict[Kernel, Choice]) -> str:
    """A table of the candidates of each call, the chosen one marked."""
    lines = []
    for call, choice in choices.items():
        lines += ["", call.noted]
        for name, found in choice.measured.items():
            mark = "*" if name == choice.name else " "
            time = f"{found:9.3f} ms  {name}" if isinstance(found, float) else f"{'-':>9}     {name}: {found}"
            lines.append(f"{mark} {time}")
    return "\n".join(lines[1:])
