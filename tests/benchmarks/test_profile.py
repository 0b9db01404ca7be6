"""The profile of a step: kinds of kernels, and the file of its cases."""

import json

import pytest

from benchmarks import profile


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false>", "attention"),
        ("_packed_attention_dkv_kernel", "attention"),
        ("_sum_places_kernel", "gathered keys"),
        ("_token_logps_fwd_kernel", "passes over logits"),
        ("_forward_kernel", "passes over logits"),
        ("indexing_backward_kernel", "other torch operators"),
        ("nvjet_sm90_tst_128x288_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast>", "other torch operators"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert profile.kind_of_kernel(name) == kind


def test_a_file_keeps_the_cases_of_one_machine_and_commit(tmp_path, monkeypatch):
    path = tmp_path / "out" / "profile.json"
    profile.add(path, "one", {"seconds": 1.0})
    profile.add(path, "two", {"seconds": 2.0})
    assert [*json.loads(path.read_text())["cases"]] == ["one", "two"]
    monkeypatch.setattr(profile, "commit", lambda: "another")
    profile.add(path, "three", {"seconds": 3.0})
    assert [*json.loads(path.read_text())["cases"]] == ["three"]
