"""The LM head with TRL's statistics, forward and backward: fastdpo, TRL, plain PyTorch."""


def test_head(time_side, case, side):
    time_side("head", case, side, rounds=5)
