"""Reference log-probabilities that are known are kept, and really used: no reference is run beside them."""


def test_known_reference_log_probs_are_used(line, tmp_path):
    computed = line.train(tmp_path / "computed")
    known = line.train_with_known_reference(tmp_path / "known")
    for a, b in zip(computed.gradients, known.gradients, strict=True):
        for name in a:
            assert (a[name] - b[name]).norm() <= 1e-5 * a[name].norm() + 1e-7, name
    assert computed.calls["reference", "fused"] == computed.calls["policy", "fused"] == 3
