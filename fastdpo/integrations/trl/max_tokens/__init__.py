"""`patch(max_tokens=...)` for trainers of TRL: what a step trains on is cut into micro-batches.

    budget.py          collects the batches of a step, and has TRL log the numbers of its own
    padded_budget.py   the batches of trainers whose collators pad them
    planning.py        cuts units, which are rows or groups of rows, into micro-batches
    learned_tokens.py  "auto": how many tokens a micro-batch may have
    dealing.py         deals pairs to the ranks
    refusals.py        what is not supported, and why

`budget.BudgetLine` says what the line of a trainer defines.
"""
