"""`patch(verify=True)` verifies the first calls of each trainer, changes nothing, and raises if an op is wrong."""

from tests.contract.harness import cases
from tests.support.trl.verified import assert_scores_verified, assert_verified


@cases("verified")
def test_verifying(case, tmp_path, monkeypatch, caplog):
    harness, (options, calls) = case.harness, case.value

    def train(directory):
        return harness.train(tmp_path / directory, *harness.models(), **options)

    if harness.scores is not None:
        assert_scores_verified(train, harness.name, monkeypatch, caplog, harness.scores)
    else:
        assert_verified(train, tmp_path, harness.name, caplog=caplog, calls=calls)
