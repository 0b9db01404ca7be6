"""Log-probabilities and gradients under dropout, in TRL's padded rows and with shared prompts.

    python -m benchmarks.dropout [--json OUT]

Writes the tables of docs/notes/numerics.md.

A draw is one forward pass with new dropout masks. A batch holds many copies of a few pairs, each of
which is a draw of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from rich.progress import track
from scipy import stats
from tabulate import tabulate
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import machine
from benchmarks import tables as tables_of_suites
from benchmarks.run import PACKAGES
from benchmarks.tables import wrap
from fastdpo.models import forward
from fastdpo.models.state import ForwardOptions
from fastdpo.packing import IGNORE_INDEX

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "dropout.json", ROOT / "docs" / "notes" / "numerics.md"
BEGIN, END = "<!-- dropout:begin -->", "<!-- dropout:end -->"
TEXT = ROOT / "benchmarks" / "demo" / "preferences.jsonl"
BETA = 0.1
PROMPT, ANSWER = 48, 32
"""Tokens of the prompt and of the answers of measured pairs."""
PAIRS, CALLS, COPIES = 4, 48, 32
STEPS, LEARNING_RATE = 250, 4e-3
PROJECTIONS = 8
"""Gradients are compared in this many random directions."""


class Pairs(NamedTuple):
    """A batch of P pairs without padding.

    Attributes:
        ids: int64 [2P, L], chosen rows first.
        labels: int64 [2P, L], `IGNORE_INDEX` in prompts.
    """

    ids: Tensor
    labels: Tensor

    def copies(self, n: int) -> Pairs:
        """The batch with each pair n times, as [n, P] pairs."""
        return Pairs(*(torch.cat([half.repeat(n, 1) for half in x.chunk(2)]) for x in self))


class Draws(NamedTuple):
    """What a model returned with different dropout masks.

    Attributes:
        logps: float64 [N, P, 2], sums over the tokens of chosen and rejected rows.
        slopes: float64 [C, PROJECTIONS], the gradient of the sum of all `logps`, of C calls, each
            averaged over its draws, in random directions.
        loss_slopes: [C, PROJECTIONS], the same of DPO's loss.
    """

    logps: Tensor
    slopes: Tensor
    loss_slopes: Tensor

    def margins(self) -> Tensor:
        """[N, P] log-probability of chosen minus rejected rows."""
        return self.logps[..., 0] - self.logps[..., 1]


Score = Callable[[nn.Module, Pairs], Tensor]
"""Sums of log-probabilities [2P] of a batch."""


def stock_score(model: nn.Module, pairs: Pairs) -> Tensor:
    """The rows one by one, without fastdpo."""
    logits = model(input_ids=pairs.ids, attention_mask=torch.ones_like(pairs.ids)).logits[:, :-1]
    targets = pairs.labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return -losses.sum(1)


def fused_score(model: nn.Module, pairs: Pairs) -> Tensor:
    """The fused forward of `install`."""
    mask = torch.ones_like(pairs.ids)
    return model(input_ids=pairs.ids, attention_mask=mask, labels=pairs.labels, fused_lm_head=True).sum(1)


def install(model: nn.Module, **options: Any) -> None:
    """Makes `fused_score` compute a model's log-probabilities, with options of `ForwardOptions`."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    request = ForwardOptions("benchmarks", "policy", groups="pairs", **options)  # else copies would share their masks
    forward.install(base, request, lambda scored, _: scored.logps.logps)


def draw(model: nn.Module, pairs: Pairs, score: Score, *, calls: int, copies: int, seed: int = 0) -> Draws:
    """Calls a model in training mode, each time on new copies of the pairs."""
    parameters = [x for x in model.parameters() if x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(PROJECTIONS, x.numel(), generator=generator) for x in parameters]
    model.eval()
    with torch.no_grad():
        reference = stock_score(model, pairs).view(2, 1, -1)  # [2, 1, P], without dropout
    model.train()
    torch.manual_seed(seed)
    found: tuple[list[Tensor], ...] = ([], [], [])
    batch = pairs.copies(copies)
    for _ in range(calls):
        for slopes in found[1:]:
            logps = score(model, batch).view(2, copies, -1)  # [2, copies, P]
            gains = logps - reference
            is_loss = slopes is found[2]
            value = -F.logsigmoid(BETA * (gains[0] - gains[1])) if is_loss else logps.sum(0)
            gradients = torch.autograd.grad(value.mean(), parameters)
            slopes.append(sum(d @ g.flatten() for d, g in zip(directions, gradients, strict=True)).double())
            found[0].append(logps.detach().double().permute(1, 2, 0))
    return Draws(torch.cat(found[0]), *(torch.stack(x) for x in found[1:]))


def mean_p_value(a: Tensor, b: Tensor) -> float:
    """The probability of means of [N, ...] draws that differ as much as these if the expectations
    are equal: the smallest of Welch's tests over the other dimensions, times their number
    (Bonferroni).
    """
    p = stats.ttest_ind(a.flatten(1).numpy(), b.flatten(1).numpy(), equal_var=False).pvalue
    return float(min(1.0, p.min() * p.size))


def distribution_p_value(a: Tensor, b: Tensor) -> float:
    """The probability of draws [N, ...] that differ as much as these if their distributions are equal:
    the smallest of Kolmogorov-Smirnov's tests over the other dimensions, times their number.
    """
    pairs = zip(a.flatten(1).T.numpy(), b.flatten(1).T.numpy(), strict=True)
    p = [float(stats.ks_2samp(*pair).pvalue) for pair in pairs]
    return min(1.0, min(p) * len(p))


def larger_variance_p_value(a: Tensor, b: Tensor) -> float:
    """The probability of variances of a [N, P] as far above those of b as these if they are equal:
    the smallest of one-sided Brown-Forsythe tests over the columns, times their number.
    """
    spread_a, spread_b = ((x - x.median(0).values).abs().numpy() for x in (a, b))
    p = stats.ttest_ind(spread_a, spread_b, equal_var=False, alternative="greater").pvalue
    return float(min(1.0, p.min() * p.size))


def variance_ratio(a: Tensor, b: Tensor) -> list[float]:
    """The variance of a [N, J] by that of b, summed over J, and its bootstrapped 95 % interval."""
    spreads = [(x - x.mean(0)).square().sum(1).numpy() for x in (a, b)]

    def ratio(x: Any, y: Any, axis: int = -1) -> Any:
        return x.mean(axis) / y.mean(axis)

    resampled = stats.bootstrap(spreads, ratio, n_resamples=999, batch=100, method="percentile", rng=0)
    return [float(x) for x in (ratio(*spreads), *resampled.confidence_interval)]


def trained_text() -> Tensor:
    """The bytes of the demo's pairs, which models are trained on."""
    rows = [json.loads(line) for line in TEXT.read_text().splitlines()]
    text = "".join(f"{row['prompt']}{row[answer]}\n" for row in rows for answer in ("chosen", "rejected"))
    return torch.tensor(list(text.encode()))


def measured_pairs() -> Pairs:
    """The first of the demo's pairs that are long enough: the end of each prompt, and the beginning
    of both answers.
    """
    rows = [json.loads(line) for line in TEXT.read_text().splitlines()]
    rows = [{name: list(x.encode()) for name, x in row.items()} for row in rows]
    kept = [
        row
        for row in rows
        if len(row["prompt"]) >= PROMPT
        and min(len(row["chosen"]), len(row["rejected"])) >= ANSWER
        and row["chosen"][0] != row["rejected"][0]
    ]
    answers = ("chosen", "rejected")
    ids = torch.tensor([row["prompt"][-PROMPT:] + row[x][:ANSWER] for x in answers for row in kept[:PAIRS]])
    labels = ids.clone()
    labels[:, :PROMPT] = IGNORE_INDEX
    return Pairs(ids, labels)


def _train(model: PreTrainedModel, text: Tensor) -> None:
    """Next-token training, with the model's dropout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    length = PROMPT + ANSWER
    model.train()
    for _ in range(STEPS):
        starts = torch.randint(len(text) - length, (8,)).tolist()
        rows = torch.stack([text[start : start + length] for start in starts])
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        schedule.step()


def _llama_with_lora(text: Tensor) -> nn.Module:
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    tokens = dict(bos_token_id=None, eos_token_id=None)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens))
    _train(model, text)
    options = dict(r=8, lora_alpha=8, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, LoraConfig(**options))


def _gpt2(text: Tensor) -> nn.Module:
    dropout = dict(attn_pdrop=0.0, resid_pdrop=0.1, embd_pdrop=0.1)
    sizes = dict(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=PROMPT + ANSWER)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None))
    _train(model, text)
    return model


MODELS: dict[str, Callable[[Tensor], nn.Module]] = {
    "Llama with LoRA, lora_dropout=0.05": _llama_with_lora,
    "GPT-2, dropout 0.1 of embeddings and residuals": _gpt2,
}


def measure() -> dict[str, Any]:
    """For each model the p-values of the comparisons, and ratios of variances."""
    pairs, text = measured_pairs(), trained_text()
    found: dict[str, Any] = {}
    for name, build in track(MODELS.items(), description="models"):
        torch.manual_seed(0)
        model = build(text)
        stock = draw(model, pairs, stock_score, calls=CALLS, copies=COPIES, seed=1)
        install(model)
        shared = draw(model, pairs, fused_score, calls=CALLS, copies=COPIES, seed=2)
        found[name] = {
            "draws": len(shared.logps),
            "distributions": distribution_p_value(stock.logps, shared.logps),
            "log-probs": mean_p_value(stock.logps, shared.logps),
            "their gradient": mean_p_value(stock.slopes, shared.slopes),
            "the loss's gradient": mean_p_value(stock.loss_slopes, shared.loss_slopes),
            "margins": variance_ratio(shared.margins(), stock.margins()),
            "gradients": variance_ratio(shared.loss_slopes, stock.loss_slopes),
        }
    return found


def tables(result: dict[str, Any]) -> str:
    """What docs/notes/numerics.md shows of a result."""
    models = result["models"]
    means = [
        [name, *(f"{x[key]:.2f}" for key in ("distributions", "log-probs", "their gradient", "the loss's gradient"))]
        for name, x in models.items()
    ]
    spreads = [
        [name, *("{:.2f} ({:.2f} to {:.2f})".format(*x[key]) for key in ("margins", "gradients"))]
        for name, x in models.items()
    ]
    options: dict[str, Any] = dict(tablefmt="github", disable_numparse=True)
    headers = [
        *("p-values", "distributions of log-probs", "means of log-probs"),
        *("means of their gradient", "means of the loss's gradient"),
    ]
    ratios = ["variance, shared by padded", "margins", "gradient of DPO's loss"]
    where = f"{next(iter(models.values()))['draws']:,} draws of log-probs a side, half of them for each gradient; "
    host, commit = tables_of_suites.machine_of(result), tables_of_suites.short_commit(result["commit"])
    where += f"{host}, torch {result['versions']['torch']}; {result['date'][:10]}, commit {commit}."
    return "\n\n".join([tabulate(means, headers, **options), tabulate(spreads, ratios, **options), wrap(where)])


def with_tables(page: str, result: dict[str, Any]) -> str:
    """A page with the tables of a result between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(result)}\n\n{END}{rest.split(END)[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dropout", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULT, help="output file")
    args = parser.parse_args(argv)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.machine() | {"bfloat16": machine.bfloat16()},
        "versions": machine.versions(*PACKAGES),
        "models": measure(),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if args.json == RESULT:
        PAGE.write_text(with_tables(PAGE.read_text(), result))
    print(tables(result))


if __name__ == "__main__":
    sys.exit(main())
