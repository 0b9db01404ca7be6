"""OnlineDPOTrainer of TRL 0.29 to 1.14, stock against patched."""

import pytest

from tests.support.trl.dpo import adapter
from tests.support.trl.online import assert_option_trains_alike


@pytest.mark.parametrize("options", [{}, adapter() | dict(gradient_accumulation_steps=2)], ids=["full", "adapter"])
def test_option(tmp_path, options):
    assert_option_trains_alike(tmp_path, **options)
