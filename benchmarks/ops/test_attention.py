"""Attention of one layer, forward and backward: padded, packed, and packed with shared prompts."""


def test_attention(time_side, case, side):
    time_side("attention", case, side, rounds=10)
