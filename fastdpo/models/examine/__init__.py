"""Examines a model: by what it is, by a few random rows, packed and padded, and in its first calls, fused and by the
prior forward.

    support.py       what its configuration and its modules rule out
    probe.py         a few random rows (rows.py), packed and padded
    runs.py          their hidden states and gradients
    comparable.py    runs that leave the model as it was, with snapshot.py (what it holds)
    gradients.py     gradients in a form that is small enough to keep
    verification.py  audits, which compare fused calls with the forward that the model had before
"""
