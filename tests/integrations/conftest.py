"""What the tests of trainers share: one training, stock and patched, from the same start."""

import pytest
from trl_runs import Run, tiny_model, train

import fastdpo


@pytest.fixture
def both(tmp_path):
    """Trains stock, then patched, from the same start.

    `prepare` is what is done with each model before a trainer gets it.
    """

    def run(kind="llama", tiny=None, reference=True, prepare=lambda model: model, **options) -> list[Run]:
        results = []
        for name in ("stock", "patched"):
            model = prepare(tiny_model(kind, seed=0, **(tiny or {})))
            ref = prepare(tiny_model(kind, seed=1, **(tiny or {}))) if reference else None
            directory = tmp_path / name
            if name == "stock":
                results.append(train(directory, model, ref, **options))
            else:
                with fastdpo.patched("trl.DPOTrainer"):
                    results.append(train(directory, model, ref, **options))
        return results

    return run
