"""Rotary embeddings that depend on the width of a batch. Transformers 4 keeps their configuration in another
place than transformers 5.
"""

import pytest

from fastdpo.models import parts
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import long_pairs, tiny_model

NARROW = ((1, 2, 3), (5, 3, 2), (8, 4, 3), (2, 7, 1))
DATA = long_pairs((*NARROW, (1, 9, 20), (11, 1, 25), (5, 3, 12), (14, 13, 12)))
LONG_FACTORS = dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0])
CONFIGURATIONS = {  # kind of model: entries of its configuration, and the limit
    "phi3": (dict(rope_scaling=dict(type="longrope", **LONG_FACTORS), original_max_position_embeddings=16), 16),
    "llama": (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=16), 15),
}
EPOCHS = dict(data=DATA, per_device_train_batch_size=2, max_steps=-1, num_train_epochs=2)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_same_training(both, kind):
    tiny, limit = CONFIGURATIONS[kind]
    assert parts.rope_limit(tiny_model(kind, **tiny)) == limit
    assert_trained_alike(both(kind, tiny=tiny, **EPOCHS), policy=8, reference=8)
