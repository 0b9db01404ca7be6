"""Known reference log-probabilities are used instead of running the reference."""

from tests.support.comparison import assert_same_gradients


def test_known_reference_log_probs_are_used(line, tmp_path):
    computed = line.train(tmp_path / "computed")
    known = line.train_with_known_reference(tmp_path / "known")
    assert_same_gradients(computed.gradients, known.gradients)
    assert computed.calls["reference", "fused"] == computed.calls["policy", "fused"] == 3
