"""preference_loss: equal to TRL's losses, or to the formulas of papers, but finite where these overflow.
`tests/fuzz/test_losses.py` has rewards and weights.
"""

import dataclasses
import math
import re
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastdpo.ops import PreferenceObjective, preference_loss
from fastdpo.ops.losses.divergences import DIVERGENCES
from fastdpo.ops.losses.objectives import LOSSES, MARGIN_LOSSES, REFERENCE_FREE

OTHERS = ("cdpo", "ipo_sum", "simpo", "simpo_sum")  # the losses that TRL's DPOTrainer lacks
OF_TRL = [name for name in LOSSES if name not in OTHERS]
SMOOTHING = {"exo_pair": 0.001}  # label smoothing that a loss requires
OTHER_DIVERGENCES = [name for name in DIVERGENCES if name != "reverse_kl"]

OBJECTIVES = {loss: dict(loss_type=loss, label_smoothing=SMOOTHING.get(loss, 0.0)) for loss in OF_TRL}
OBJECTIVES |= {
    f"{loss} {divergence}": {**OBJECTIVES[loss], "f_divergence_type": divergence}
    for loss, divergence in product([x for x in MARGIN_LOSSES if x in OF_TRL], OTHER_DIVERGENCES)
}
CONSTANTS = {  # a value other than the default for each constant, with losses that use it
    "exo_pair smoothed": dict(loss_type="exo_pair", label_smoothing=0.3, beta=0.7),
    "robust smoothed": dict(loss_type="robust", label_smoothing=0.2),
    "aot smoothed": dict(loss_type="aot", label_smoothing=0.2),
    "aot_unpaired smoothed": dict(loss_type="aot_unpaired", label_smoothing=0.7),
    "ipo beta": dict(loss_type="ipo", beta=0.03),
    "sppo_hard beta": dict(loss_type="sppo_hard", beta=2.0),
    "discopop tau": dict(loss_type="discopop", discopop_tau=1.5, beta=1.0),
    "alpha above 1": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.7),
    "alpha 1": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0),
    "alpha 0": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.0),
}
SUMS = {  # several losses, with and without weights and constants that only some of them use
    "mpo": dict(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "no weights": dict(loss_type=["ipo", "robust", "apo_down"], label_smoothing=0.1),
    "divergence": dict(loss_type=["sigmoid_norm", "sft"], loss_weights=[2.0, -0.5], f_divergence_type="js_divergence"),
}
ALL = {**OBJECTIVES, **CONSTANTS, **SUMS}
EXTREME = {**OBJECTIVES, **CONSTANTS, **{name: dict(loss_type=name) for name in LOSSES if name not in OF_TRL}}


def random_batch(p=5, length=9):
    """Token log-probabilities of a policy and its reference. Rows i and p + i are a pair."""
    mask = torch.zeros(2 * p, length + 1, dtype=torch.long)  # per token, as TRL's collator makes it
    for row in mask:
        begin = int(torch.randint(1, 4, ()))
        row[begin : begin + int(torch.randint(1, length - 2, ()))] = 1
    scored = mask[:, 1:]
    reference = -4 * torch.rand(2 * p, length) * scored
    policy = (reference + 0.7 * torch.randn(2 * p, length)) * scored
    return SimpleNamespace(mask=mask, scored=scored, policy=policy, ref=reference)


def of_fastdpo(batch, objective):
    """The result of preference_loss, and the gradient of the policy's token log-probabilities."""
    tokens = batch.policy.clone().requires_grad_()
    policy = tokens * batch.scored
    lengths = batch.scored.sum(1).chunk(2)
    result = preference_loss(
        *policy.sum(1).chunk(2),
        *batch.ref.sum(1).chunk(2),
        PreferenceObjective(**objective),
        chosen_lengths=lengths[0],
        rejected_lengths=lengths[1],
        sft_logps=policy.sum(1).chunk(2)[0],
    )
    result.loss.backward()
    return result, tokens.grad


@pytest.fixture(scope="module")
def trl():
    """TRL's trainer module."""
    return pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is not installed")


@pytest.fixture
def trl_result(trl):
    """The result of TRL's loss, the gradient of the policy's log-probabilities, and the metrics."""

    class Model(torch.nn.Module):
        """A model whose outputs have the given log-probabilities."""

        is_gradient_checkpointing = False

        def __init__(self, log_probs):
            super().__init__()
            zeros = torch.zeros_like(log_probs)
            others = dict.fromkeys(("log_sum_sq_probs", "entropy", "mean_logits"), zeros)
            self.output = SimpleNamespace(log_probs=log_probs, is_top1=zeros.bool(), **others)

        def forward(self, **inputs):
            return self.output

    def call(batch, objective):
        config = {field.name: field.default for field in dataclasses.fields(PreferenceObjective)} | objective
        losses = [config["loss_type"]] if isinstance(config["loss_type"], str) else config["loss_type"]
        tokens = batch.policy.clone().requires_grad_()
        model = Model(tokens * batch.scored)
        trainer = SimpleNamespace(
            **config,
            model=model,
            ref_model=Model(batch.ref),
            args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=config["discopop_tau"]),
            accelerator=SimpleNamespace(
                device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
            ),
            loss_types=losses,
            ld_alpha=None,
            use_weighting=False,
            precompute_ref_logps=False,
            aux_loss_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
        )
        trainer.loss_weights = config["loss_weights"] or [1.0] * len(losses)
        inputs = {"input_ids": batch.mask, "attention_mask": batch.mask, "completion_mask": batch.mask}
        loss = trl.DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
        loss.backward()
        return loss, tokens.grad, trainer._metrics["train"]

    return call


def assert_same(mine, trls):
    (result, gradient), (loss, trls_gradient, metrics) = mine, trls
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, trls_gradient, rtol=1e-5, atol=1e-6 * float(trls_gradient.abs().max()))
    assert result.chosen_rewards.mean().item() == pytest.approx(metrics["rewards/chosen"][0], rel=1e-4)
    assert result.rejected_rewards.mean().item() == pytest.approx(metrics["rewards/rejected"][0], rel=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradients_equal_trls(trl_result, monkeypatch, name):
    # TRL multiplies the losses by weights in place. That fails for hinge (relu saves its result for the
    # backward) and for sft (an expanded tensor).
    monkeypatch.setattr(torch, "relu", lambda x: x.clamp(min=0))
    batch = random_batch()
    assert_same(of_fastdpo(batch, ALL[name]), trl_result(batch, ALL[name]))


def test_losses_and_defaults_are_those_of_trl(trl, trl_result):
    with pytest.raises(ValueError, match="Unknown loss type") as raised:
        trl_result(random_batch(), dict(loss_type="nonsense"))
    assert re.findall(r"'(\w+)'", str(raised.value)) == OF_TRL
    defaults = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(trl.DPOConfig)
    }
    defaults["simpo_gamma"] = 0.5  # that of TRL's CPOConfig
    for field in dataclasses.fields(PreferenceObjective):
        mine = [field.default] if field.name == "loss_type" else field.default
        assert defaults[field.name] == mine, field.name


def of_logratios(chosen, rejected, objective):
    """The result of preference_loss for log-ratios [P], and their gradients.

    Completions have 2 and 3 tokens.
    """
    leaves = [x.clone().requires_grad_() for x in (chosen, rejected)]
    zero, lengths = torch.zeros_like(chosen), [torch.full_like(chosen, n, dtype=torch.long) for n in (2, 3)]
    options = dict(chosen_lengths=lengths[0], rejected_lengths=lengths[1])
    result = preference_loss(*leaves, zero, zero, PreferenceObjective(**objective), **options)
    return result, torch.autograd.grad(result.loss, leaves, materialize_grads=True)


EXTREMES = {  # log-ratios; every combination of two is tested
    "absurd": (-1e4, -3e3, 0.0, 3e3, 1e4),
    "around float32's exponents": (-180.0, -90.0, -82.0, -79.0, -42.0, 42.0, 79.0, 90.0, 180.0),
}


@pytest.mark.parametrize("extremes", EXTREMES)
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_margins_are_finite_and_equal_float64(name, extremes):
    objective = EXTREME[name]
    chosen, rejected = torch.tensor(list(product(EXTREMES[extremes], repeat=2))).T
    result, gradients = of_logratios(chosen, rejected, objective)
    exact, exact_gradients = of_logratios(chosen.double(), rejected.double(), objective)
    for x, expected in zip((*result, *gradients), (*exact, *exact_gradients), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-6)


SATURATED = (-40.0, -17.0, -3.0, 4.0, 18.0, 33.0)
"""Log-ratios. In float32, the logistic function of 17 and more rounds to 1."""


@pytest.mark.parametrize("name", EXTREME)
def test_saturated_gradients_equal_float64(name):
    """Gradients that are small because a sigmoid saturates have small relative errors, too."""
    objective = dict(beta=1.0) | EXTREME[name]
    for logratios in product(SATURATED, repeat=2):
        pair = torch.tensor(logratios)[:, None]
        _, gradients = of_logratios(*pair, objective)
        _, exact = of_logratios(*pair.double(), objective)
        torch.testing.assert_close(torch.cat(gradients).double(), torch.cat(exact), rtol=1e-4, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_saturated_gradients_of_apo_are_those_of_the_formulas(dtype):
    small = math.exp(-60)  # sigma(-60) sigma(60), which rounds to 0 as y (1 - y) in float64, too
    cases = {  # log-ratios: gradients
        ("apo_zero", -60.0, 60.0): (-small, small),
        ("apo_down", 60.0, 0.0): (small - small, small),
        ("apo_down", -60.0, 0.0): (small - small, small),
        ("apo_down", -4.0, 56.0): (1 / (2 + 2 * math.cosh(4)), small),
    }
    for (loss, *logratios), expected in cases.items():
        pair = torch.tensor(logratios, dtype=dtype)[:, None]
        _, gradients = of_logratios(*pair, dict(loss_type=loss, beta=1.0))
        torch.testing.assert_close([x.item() for x in gradients], list(expected), rtol=1e-5, atol=0.0)


def test_no_gradient_reaches_the_reference():
    leaves = [torch.randn(4, requires_grad=True) for _ in range(4)]
    result = preference_loss(*leaves)
    result.loss.backward()
    assert [leaf.grad is None for leaf in leaves] == [False, False, True, True]
    assert not result.chosen_rewards.requires_grad


def test_one_float64_input_makes_all_results_float64():
    logps = [torch.randn(4) for _ in range(4)]
    result = preference_loss(*logps[:3], logps[3].double(), weights=torch.ones(4).bfloat16())
    assert {x.dtype for x in result} == {torch.float64}


COMPILED = {  # all losses and options, in few graphs
    "reverse_kl": dict(loss_type=OF_TRL, label_smoothing=0.1),
    **{name: dict(loss_type=["sigmoid", "ipo"], f_divergence_type=name) for name in OTHER_DIVERGENCES},
}


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize(
    ("divergence", "backend"),
    [
        *((divergence, "aot_eager") for divergence in OTHER_DIVERGENCES),  # traces the backward as well
        ("reverse_kl", "eager"),
        pytest.param("reverse_kl", "aot_eager", marks=pytest.mark.thorough),
    ],
)
def test_fullgraph_compiles_for_any_number_of_pairs(divergence, backend):
    torch.compiler.reset()
    objective = PreferenceObjective(**COMPILED[divergence])

    def loss(policy, ref, mask):
        sums = [x.sum(1).chunk(2) for x in (policy, ref)]
        lengths = mask.sum(1).chunk(2)
        weights = None if divergence == "reverse_kl" else lengths[0] / lengths[1]
        options = dict(chosen_lengths=lengths[0], rejected_lengths=lengths[1], weights=weights)
        return preference_loss(*sums[0], *sums[1], objective, **options)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for p, length in ((3, 9), (5, 7)):
        batch = random_batch(p, length)
        results = []
        for function in (compiled, loss):
            policy = batch.policy.clone().requires_grad_()
            result = function(policy, batch.ref, batch.scored)
            result.loss.backward()
            results.append([*result, policy.grad])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("divergence", COMPILED)
def test_does_not_synchronize(divergence):
    with torch.device("meta"):  # meta tensors have no values
        logps = torch.empty(2, 4)
        result, _ = of_logratios(*logps, COMPILED[divergence])
        assert result.loss.device.type == "meta"


BETA, EPS, GAMMA = 0.4, 0.15, 0.8  # of the losses that TRL lacks


def formula(name: str, c: Tensor, r: Tensor, ref_c: Tensor, ref_r: Tensor, n_c: Tensor, n_r: Tensor) -> Tensor:
    """The losses of the papers, written out."""
    h = (c - ref_c) - (r - ref_r)
    if name == "cdpo":
        p = 1 / (1 + torch.exp(-BETA * h))
        return -(1 - EPS) * p.log() - EPS * (1 - p).log()
    if name == "ipo_sum":
        return (h - 1 / (2 * BETA)) ** 2
    margin = c / n_c - r / n_r if name == "simpo" else c - r
    return torch.log(1 + torch.exp(-(BETA * margin - GAMMA)))


def objective_of(name: str) -> PreferenceObjective:
    return PreferenceObjective(name, beta=BETA, simpo_gamma=GAMMA, label_smoothing=EPS if name == "cdpo" else 0.0)


@pytest.fixture
def pairs():
    torch.manual_seed(0)
    logps = [-5 * torch.rand(4, dtype=torch.float64) - 1 for _ in range(4)]
    return *logps, torch.tensor([3, 1, 4, 2]), torch.tensor([2, 5, 1, 4])


@pytest.mark.parametrize("name", OTHERS)
def test_losses_and_gradients_are_those_of_the_papers(name, pairs):
    *logps, n_c, n_r = (x.clone().requires_grad_(x.is_floating_point()) for x in pairs)
    result = preference_loss(*logps, objective_of(name), chosen_lengths=n_c, rejected_lengths=n_r)
    expected = formula(name, *logps, n_c, n_r)
    torch.testing.assert_close(result.losses, expected)
    torch.testing.assert_close(result.loss, expected.mean())
    for a, b in zip(*(torch.autograd.grad(x, logps[:2]) for x in (result.loss, expected.mean())), strict=True):
        torch.testing.assert_close(a, b)


def test_losses_without_a_reference(pairs):
    c, r, ref_c, ref_r, n_c, n_r = pairs
    lengths = dict(chosen_lengths=n_c, rejected_lengths=n_r)
    for name in REFERENCE_FREE:
        free, given = preference_loss(c, r, objective=objective_of(name), **lengths), objective_of(name)
        torch.testing.assert_close(free.losses, preference_loss(c, r, ref_c, ref_r, given, **lengths).losses)
        torch.testing.assert_close(free.chosen_rewards, BETA * (c / n_c if name == "simpo" else c))
    with pytest.raises(TypeError, match=r"^preference_loss: ref_chosen_logps must be a tensor; got None"):
        preference_loss(c, r)
    with pytest.raises(ValueError, match=r"^preference_loss: rejected_lengths must be given for the loss simpo"):
        preference_loss(c, r, objective=PreferenceObjective("simpo"), chosen_lengths=n_c)
