"""Wrong ops that no check of a model notices before a training."""

from dataclasses import replace

from fastdpo.models import forward, head, support


def targets_off_by_one(monkeypatch):
    """Scores each target from the hidden state before the right one."""
    right = forward._layout

    def wrong(*args, **kwargs):
        layout = right(*args, **kwargs)
        return replace(layout, score_index=(layout.score_index - 1).clamp(min=0))

    monkeypatch.setattr(forward, "_layout", wrong)


def no_softcap(monkeypatch):
    """Leaves out the softcap of a head."""
    monkeypatch.setattr(support, "logit_transform", lambda config: (None, 1.0))


def scaled_gradients(monkeypatch):
    """Makes the gradients of all weights but the head's too large by a thousandth."""
    right = head.linear_logps

    def wrong(hidden, *args, **kwargs):
        return right(hidden.detach() + 1.001 * (hidden - hidden.detach()), *args, **kwargs)

    monkeypatch.setattr(head, "linear_logps", wrong)


SOFTCAPPED = dict(kind="gemma2", final_logit_softcapping=2.0)
"""A tiny model whose head has a softcap."""
