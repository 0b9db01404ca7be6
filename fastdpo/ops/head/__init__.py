"""Log-probabilities and statistics of target tokens, from hidden states and the LM head or from logits.

`linear_logps` is the op, `passes` its two passes over tiles of tokens, and `logit_rows` what PyTorch computes of
a tile.
"""
