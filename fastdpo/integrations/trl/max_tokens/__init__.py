"""`patch(max_tokens=...)` for trainers of TRL: what a step trains on is cut into micro-batches.

    budget.py          the part of a line by which its trainers' steps are cut
    steps.py           the steps of one trainer: collects their batches, and has TRL log the numbers of its own
    planning.py        cuts units, which are rows or groups of rows, into micro-batches
    learned_tokens.py  "own" and "auto": how many tokens a micro-batch may have
    dealing.py         deals pairs to the ranks
    refusals.py        what is not supported, and why

`budget.Budget` says what a trainer defines.
"""
