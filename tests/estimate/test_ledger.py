"""The ledger that counts the bytes of tensors that are alive."""

import torch
from torch._subclasses import FakeTensorMode

from fastdpo.commands.estimate.ledger import MemoryLedger


def test_views_of_tensors_that_exist_take_no_memory():
    with FakeTensorMode():
        weight = torch.empty(100, 10)
        with MemoryLedger({}, 0, [weight]) as ledger:
            view = weight.t()
            assert ledger.live == 0
            result = torch.empty(5, 10) @ view
            del view
            assert ledger.live == result.untyped_storage().nbytes() == 2000
            del result
            assert ledger.live == 0
