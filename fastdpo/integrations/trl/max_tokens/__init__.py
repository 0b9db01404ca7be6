"""`patch(max_tokens=...)` for trainers of TRL: a step's pairs are cut where they are collated, or its rows before they
are trained on.
"""
