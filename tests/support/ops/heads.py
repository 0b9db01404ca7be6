"""Random inputs of an LM head, and calls of a head that return its results and gradients."""

import torch

from fastdpo.ops.head.results import STATISTICS

LEAVES = ("hidden", "weight", "bias")
OUTPUTS = ("logps", *STATISTICS)
REAL_OUTPUTS = tuple(name for name in OUTPUTS if name != "is_top1")
OPTIONS = {
    "plain": {},  # no transform is applied at all
    "softcap": dict(softcap=5.0),  # low enough to affect most logits
    "logit_scale": dict(logit_scale=0.3),  # as in Cohere's models
    "temperature": dict(temperature=0.7),  # sharpens the distribution
    "all": dict(softcap=5.0, logit_scale=1.7, temperature=0.7),  # the order of the options matters
}
MODES = {  # inputs that need a gradient, and rows whose gradient tiles fit in the budget
    "nothing": ((), 1000),  # evaluation, the reference model
    "frozen": (("hidden",), 1000),  # LoRA: the gradient is formed in the forward
    "kept": (LEAVES, 1000),  # all tiles are kept for the backward
    "some kept": (LEAVES, 20),  # two tiles of eight rows are kept; the others are recomputed
    "recomputed": (LEAVES, 0),  # no tile is kept
    "weight alone": (("weight",), 20),  # a head on a frozen body
    "bias alone": (("bias",), 20),  # only one parameter of the head is trained
}


def head_inputs(n, v, d, dtype=torch.float32):
    """Random hidden states, weight, bias and targets of n tokens.

    Every third prediction is confident, and one target is ignored.
    """
    hidden, weight, bias, targets = torch.randn(n, d), torch.randn(v, d), torch.randn(v), torch.randint(v, (n,))
    hidden[1::3] += weight[targets[1::3]]
    targets[n // 2 + 1 :: n] = -100
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "bias": bias.to(dtype), "targets": targets}


def doubled(inputs):
    return {name: x.double() if x is not None and x.is_floating_point() else x for name, x in inputs.items()}


def results_and_gradients(
    op, inputs, upstream=None, needs=LEAVES, differentiate=("logps",), outputs=OUTPUTS, **options
):
    """Returns the results of `op` and a dict with the gradients of the inputs named in `needs`."""
    leaves = {name: None if inputs[name] is None else inputs[name].detach().clone() for name in LEAVES}
    needs = [name for name in needs if leaves[name] is not None]
    for name in needs:
        leaves[name].requires_grad_()
    results = op(leaves["hidden"], leaves["weight"], inputs["targets"], bias=leaves["bias"], outputs=outputs, **options)
    if needs:
        upstream = torch.ones(2, len(inputs["targets"])) if upstream is None else upstream
        terms = zip(("logps", "entropy"), upstream, strict=True)
        sum((getattr(results, name) * g).sum() for name, g in terms if name in differentiate).backward()
    return results, {name: leaves[name].grad for name in needs}


class Dropped(torch.autograd.Function):
    """Sums its inputs. Its backward returns no gradient for them."""

    @staticmethod
    def forward(ctx, *values):
        ctx.count = len(values)
        return sum(value.sum() for value in values)

    @staticmethod
    def backward(ctx, grad):
        return (None,) * ctx.count
