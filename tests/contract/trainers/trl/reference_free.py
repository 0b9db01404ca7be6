"""TRL's CPOTrainer and ORPOTrainer.

Stock averages `logits/*` over prompts and padding, too. These are compared with `completions_only`,
which is stock with logits of completion tokens only; all other numbers are compared with stock itself.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.comparison import double
from tests.support.models.families import FUSED
from tests.support.trl.dpo import Recipe, Run, adapter, assert_same, assert_same_bits, pairs, tiny_model, train_both
from tests.support.trl.reference_free import CPO, ORPO

FULL = dict(policy=3)
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}


def completions_only(trainer_class: type) -> type:
    """A subclass that returns logits of the completions only."""

    class CompletionsOnly(trainer_class):
        def concatenated_forward(self, model, batch):
            chosen_logps, rejected_logps, *logits_and_losses = super().concatenated_forward(model, batch)
            logits, losses = logits_and_losses[:2], logits_and_losses[2:]
            width = max(batch[f"{name}_labels"].shape[1] for name in ("chosen", "rejected"))
            for i, name in enumerate(("chosen", "rejected")):
                scored = torch.zeros(len(logits[i]), width - 1, dtype=torch.bool)
                labels = batch[f"{name}_labels"][:, 1:]
                scored[:, : labels.shape[1]] = labels != -100
                logits[i] = logits[i][:, : width - 1][scored]
            return chosen_logps, rejected_logps, *logits, *losses

    return CompletionsOnly


def three_runs(
    recipe: Recipe, directory: Path, kind: str = "llama", tiny=None, prepare=lambda x: x, **options
) -> list[Run]:
    """Stock, `completions_only` stock, and patched."""
    name = f"trl.{recipe.trainer_class.__name__}"
    both = dict(reference=False, trainer=name, train=recipe.train, prepare=prepare)
    stock, patched = train_both(directory, kind, tiny, **both, **options)

    def completions(name: str, cast=lambda model: model) -> Run:
        model = cast(prepare(tiny_model(kind, **(tiny or {}))))
        trainer_class = completions_only(options.get("trainer_class", recipe.trainer_class))
        return recipe.train(directory / name, model, **{**options, "trainer_class": trainer_class})

    defined = completions("defined")
    defined.in_float64 = functools.partial(completions, "defined in float64", double)
    return [stock, defined, patched]


def without_logits(run: Run) -> Run:
    logs = [{name: x for name, x in log.items() if "logits/" not in name} for log in run.logs]
    again = run.in_float64
    return replace(run, logs=logs, in_float64=None if again is None else lambda: without_logits(again()))


def assert_all_same(stock: Run, defined: Run, patched: Run) -> None:
    assert not stock.calls
    assert_same(without_logits(stock), without_logits(patched))
    assert_same(defined, patched)


LONG = [{**row, "chosen": " ".join([row["chosen"]] * 3), "prompt": row["prompt"] * 2} for row in pairs(16)]
ROUTER = FUSED["mixtral"][1] | dict(output_router_logits=True, router_aux_loss_coef=0.5)
OPTIONS = {
    "as it is": (dict(), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),
    "truncated": (dict(max_length=32, data=LONG), FULL),
    "adapter": (dict(evaluate=4, **ADAPTER), dict(policy=3, eval=1)),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "routers": (dict(kind="mixtral", tiny=ROUTER), FULL),
    "softcap": (dict(kind="gemma2", tiny=FUSED["gemma2"][1]), FULL),
    "learned positions": (dict(kind="gpt2", tiny=FUSED["gpt2"][1]), FULL),
}
OPTIONS_OF_CPO = {
    "ipo": dict(loss_type="ipo"),
    "hinge": dict(loss_type="hinge"),
    "simpo": dict(loss_type="simpo", cpo_alpha=0.0),
    "simpo with nll": dict(loss_type="simpo", cpo_alpha=0.5),
    "alpha": dict(alpha=0.02, loss_type="simpo"),
    "label_smoothing": dict(label_smoothing=0.1),
}


def assert_all_same_bits(stock: Run, defined: Run, patched: Run) -> None:
    assert_same_bits(without_logits(stock), without_logits(patched))
    assert_same(defined, patched)


def harness(recipe: Recipe, **attributes) -> Harness:
    class Own(recipe.trainer_class):
        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            return model(batch["chosen_input_ids"], labels=batch["chosen_labels"]).loss, {}

    return Harness(
        **recipe.for_harness(),
        both=functools.partial(three_runs, recipe),
        assert_same=assert_all_same,
        assert_same_bits=assert_all_same_bits,
        fallbacks=with_dropout({("policy", "stock"): 3}, disable_dropout=False),
        bypassing=bypassed(Own, "get_batch_loss_metrics"),
        sabotages=sabotaged_by(faults.labels_a_token_late, faults.no_prefix),
        verified={"as it is": (dict(max_steps=2), 1)},
        ranks=(dict(evaluate=4), dict(policy=3, eval=1)),
        **attributes,
    )


HARNESSES = [
    harness(CPO, options=OPTIONS | {name: (options, FULL) for name, options in OPTIONS_OF_CPO.items()}),
    harness(ORPO, options=OPTIONS),
]
