"""The README's loop of one's own runs as it stands, and its numbers are those of the padded batch."""

import re
from pathlib import Path

import torch

from fastdpo import ops

README = Path(__file__).parents[1] / "README.md"
HEADS, KV_HEADS, D, VOCABULARY = 4, 2, 8, 50


def test_loop_of_ones_own():
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "ops.pack_pairs" in block
    ]
    pack, rest = code.split("\nout =", 1)
    attend, score = f"out ={rest}".split("logps =", 1)

    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (4, 9))
    ids[2:, :4] = ids[:2, :4]
    mask = torch.ones_like(ids)
    mask[3, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    embeddings = [torch.randn(VOCABULARY, h, D) for h in (HEADS, KV_HEADS, KV_HEADS)]
    head = torch.nn.Linear(HEADS * D, VOCABULARY, bias=False)

    names = {"ops": ops, "input_ids": ids, "attention_mask": mask, "labels": labels, "head": head}
    exec(pack.replace("from fastdpo import ops", ""), names)
    names.update(zip(("query", "key", "value"), (e[names["ids"][0]] for e in embeddings), strict=True))
    exec(attend, names)
    names["hidden"] = names["out"].flatten(1)
    names["ref_chosen"], names["ref_rejected"] = torch.randn(2, 2)
    exec(f"logps ={score}", names)

    expected = []
    for row in range(4):
        real = ids[row][mask[row] != 0]
        q, k, v = (e[real].transpose(0, 1)[None] for e in embeddings)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        logp = head(out[0].transpose(0, 1).flatten(1)).log_softmax(-1)
        expected.append(sum(logp[i - 1, real[i]] for i in range(4, len(real))))
    torch.testing.assert_close(torch.cat([names["chosen"], names["rejected"]]), torch.stack(expected))
    chosen_ratio, rejected_ratio = names["chosen"] - names["ref_chosen"], names["rejected"] - names["ref_rejected"]
    dpo = -torch.nn.functional.logsigmoid(0.1 * (chosen_ratio - rejected_ratio)).mean()
    torch.testing.assert_close(names["loss"], dpo)
