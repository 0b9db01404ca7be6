"""Libraries of flash attention: the functions that are called, the probe, and what takes the place of one that fails.

Stand-ins have the parameters of each supported version, and keys are gathered by PyTorch, without Triton. The results
of the libraries are tested in interpreted/test_packed_attention.py.
"""

import inspect
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fastdpo import NotFused
from fastdpo.kernels import gather_keys
from fastdpo.ops import definitions, devices, packed_attention
from fastdpo.ops.attention import device_layout, flash, routes
from fastdpo.ops.attention.device_layout import AttentionOptions, Kind, rows_of
from fastdpo.ops.attention.flash import HeadSizes, equal_sizes, sizes_of_flash_4
from fastdpo.ops.choice import notes, tuning
from tests.support.faults import raising
from tests.support.ops.attention import output_and_gradients
from tests.support.stand_ins import flash_libraries, flash_sources
from tests.support.stand_ins.flash_sources import recorded

ROWS = torch.tensor([[0, 0, 0, 9], [0, 5, 9, 4], [13, 0, 13, 20]], dtype=torch.int32, device="cpu")
CPU = torch.device("cpu")
SIZES = range(8, 257, 8)
OPTIONS = {"plain": {}, "window": dict(window=6), "softcap": dict(softcap=2.0), "both": dict(window=6, softcap=2.0)}
ALL = ("flash-attn-3", "flash-attn-4", "flash-attn-2", "torch")


@pytest.fixture(autouse=True)
def cpu_as_a_gpu(monkeypatch):
    """Offers the CPU to the backends, and gathers keys without Triton. Algorithms may be deterministic in a test."""

    def gradients(dk, dv, readers, first_reader):
        tokens = torch.arange(len(first_reader) - 1).repeat_interleave(first_reader.diff())
        empty = (x.new_zeros(len(first_reader) - 1, *x.shape[1:]) for x in (dk, dv))
        return tuple(to.index_add_(0, tokens, x[readers]) for to, x in zip(empty, (dk, dv), strict=True))

    monkeypatch.setattr(gather_keys, "gather_keys_fwd", lambda key, value, index: (key[index], value[index]))
    monkeypatch.setattr(gather_keys, "gather_keys_bwd", gradients)
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    monkeypatch.delenv(routes.VARIABLE, raising=False)
    monkeypatch.delenv("FASTDPO_STRICT", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def libraries(installed):
    """A stand-in of each library is installed."""
    installed()


def inputs(d=16, d_v=16, dtype=torch.float16):
    torch.manual_seed(0)
    return [torch.randn(33, *size).to(dtype) for size in ((4, d), (2, d), (2, d_v), (4, d_v))]


def assert_right(tensors, **options):
    exact = output_and_gradients(definitions.packed_attention, *(x.double() for x in tensors), ROWS, **options)
    for found, expected in zip(output_and_gradients(packed_attention, *tensors, ROWS, **options), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1e-2)


def chosen(query, _, value, __, **options):
    options = AttentionOptions(query.shape[2] ** -0.5, options.get("window"), options.get("softcap"))
    return routes.chosen(Kind.of(query, value, options), rows_of(ROWS, 33), (query, value))


def kind(d=16, d_v=16, windowed=False, capped=False, deterministic=False):
    options = AttentionOptions(0.25, 6 if windowed else None, 2.0 if capped else None)
    return Kind(CPU, torch.float16, 33, 4, d, 2, d_v, options, deterministic).of_kernels


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("version", recorded())
def test_every_version_is_called_by_its_parameters(version, option, installed, monkeypatch):
    installed(versions=(version,))
    monkeypatch.setenv(routes.VARIABLE, recorded()[version].backend)
    assert_right(inputs(), **OPTIONS[option])


@pytest.fixture(scope="module")
def sources():
    folder = os.environ.get(flash_sources.VARIABLE)
    if folder is None:
        pytest.skip("FLASH_SOURCES must be the folder of the libraries' packages; `make test` downloads and names it")
    return Path(folder)


@pytest.mark.parametrize("version", [name for name, library in recorded().items() if library.is_on_the_index])
def test_the_recorded_parameters_are_those_of_the_package(version, sources):
    library = recorded()[version]
    assert flash_sources.published(library, sources) == library.functions


def test_flash_attention_4_takes_the_padded_head_sizes(sources):
    source = flash_sources.text(sources, *recorded()["flash-attn-4 4.0.0b36"].source)
    validate = flash_sources.function(source, "_validate_head_dims")

    def refused(padded_by, capability):
        refusals = []
        for sizes in ((d, d_v) for d in SIZES for d_v in SIZES):
            try:
                validate(*padded_by(*sizes, capability), capability, flash.HEAD_SIZE_MULTIPLE)
            except AssertionError:
                refusals.append(sizes)
        return refusals

    assert not any(refused(sizes_of_flash_4, capability) for capability in (9, 10, 11, 12))
    assert len(refused(equal_sizes, 10)) > 500  # the rule is read


def test_flash_attention_4_refuses_what_is_probed_separately(sources):
    """`Kind` tells these apart, because the backward has them on some devices only."""
    source = flash_sources.text(sources, *recorded()["flash-attn-4 4.0.0b36"].source)
    refusals = flash_sources.refusals(source, "_flash_attn_bwd")
    messages = {x for x in refusals if "score_mod" not in x}  # which is never given
    assert {x for x in messages if "softcap" in x or "deterministic" in x} == {
        "SM100 backward with head_dim=256 does not support softcap",
        "deterministic backward not supported on SM 12.0",
    }
    assert len({kind(), kind(capped=True), kind(deterministic=True), kind(d=256)}) == 4


def test_flash_attention_2_takes_multiples_of_8_up_to_256(sources):
    library = recorded()["flash-attn 2.8.3.post2"]
    source = flash_sources.text(sources, library.source[0], "csrc/flash_attn/flash_api.cpp")
    varlen = [re.split(r"\n\w", part)[0] for part in source.split("\nmha_varlen_")[1:]]
    assert len(varlen) == 2
    for body in varlen:
        assert re.search(r"TORCH_CHECK\(head_size % 8 == 0", body)
        assert re.search(r"TORCH_CHECK\(head_size <= 256", body)
    assert {equal_sizes(d, d_v, 9) for d in SIZES for d_v in SIZES} == {HeadSizes(d, d) for d in SIZES}


def test_flash_attention_3_has_kernels_for_the_padded_head_sizes(sources):
    """It rounds head sizes up to those of its kernels. Its backward has none for values of another size than keys."""
    archive, _ = recorded()["flash-attn-3 of June 2025"].source
    generator: dict[str, Any] = {"__name__": "generate_kernels"}
    exec(flash_sources.text(sources, archive, "hopper/generate_kernels.py"), generator)
    kernels = defaultdict(set)
    for x in generator["get_all_kernels"]():
        if x.sm == 90 and x.dtype in ("fp16", "bf16"):
            kernels[x.direction, x.dtype, x.softcap].add((x.head_dim, x.head_dim_v))
    assert len(kernels) == 8
    for (direction, *_), of_kernels in kernels.items():
        equal = {HeadSizes(d, d_v) for d, d_v in of_kernels if d == d_v}
        assert max(equal_sizes(d, d_v, 9) for d in SIZES for d_v in SIZES) <= max(equal)
        assert direction == "fwd" or equal == of_kernels


@pytest.mark.parametrize(
    ("sizes", "padded"),
    [((64, 64), (64, 64)), ((100, 128), (128, 128)), ((192, 128), (192, 128)), ((136, 136), (256, 256))],
    ids=str,
)
def test_blackwell_heads_are_padded_to_sizes_that_flash_attention_4_takes(sizes, padded, libraries, monkeypatch):
    assert sizes_of_flash_4(*sizes, 10) == padded
    monkeypatch.setattr(flash, "compute_capability", lambda device: 10)
    monkeypatch.setitem(routes.BACKENDS, "flash-attn-4", flash.LIBRARIES["flash-attn-4"])
    monkeypatch.setenv(routes.VARIABLE, "flash-attn-4")
    assert_right(inputs(*sizes))


def test_libraries_that_pass_the_probe_are_chosen_in_order(libraries, monkeypatch, caplog):
    for name in ALL:
        assert chosen(*inputs()) == name
        assert routes.passes_probe(name, kind())
        monkeypatch.delitem(routes.BACKENDS, name)
    assert chosen(*inputs()) == "triton"
    assert not caplog.text


def test_a_library_that_multiplies_whole_tiles_spreads_nan_but_passes(libraries, monkeypatch):
    tensors = inputs()
    for x in tensors:
        x[13:] = torch.nan
    for name in ("flash-attn-3", "flash-attn-2"):
        monkeypatch.setenv(routes.VARIABLE, name)
        out = packed_attention(*tensors[:3], ROWS)
        assert out[:13].isnan().any() == (name == "flash-attn-3")
        assert routes.passes_probe(name, kind())


FAULTS = {  # the kind of call in which it shows
    "top left": {},
    "one key too many": {},
    "gradients of the key before": {},
    "no window": dict(windowed=True),
    "no softcap": dict(capped=True),
    "no backward with a softcap": dict(capped=True),
    "no deterministic backward": dict(deterministic=True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4", "flash-attn-2"])
def test_the_probe_finds_faults_in_the_calls_that_have_them(name, fault, installed, caplog):
    installed(faults=(fault,))
    features = FAULTS[fault]
    torch.use_deterministic_algorithms("deterministic" in features)
    assert not routes.passes_probe(name, kind(**features))
    torch.use_deterministic_algorithms(False)
    (message,) = caplog.messages
    described = "".join(f", {feature}" for feature in features)
    assert f"{name} is disabled for head sizes 16 and 16{described}: " in message
    assert ("AssertionError: " if "backward" in fault else "wrong values on a small case: ") in message
    if features:
        assert routes.passes_probe(name, kind())


def test_options_are_probed_separately(installed, caplog):
    installed(faults=("no backward with a softcap",))
    assert chosen(*inputs()) == "flash-attn-3"
    assert chosen(*inputs(), softcap=2.0) == "triton"
    assert "flash-attn-4 is disabled for head sizes 16 and 16, capped: AssertionError" in caplog.text


@pytest.mark.parametrize("fault", ["top left without a window", "no backward without a window"])
def test_a_window_that_hides_nothing_is_probed_as_none(fault, installed, monkeypatch, caplog):
    """The library computes it without the window, so that is what must have passed."""
    installed(faults=(fault,))
    assert_right(inputs(), window=19)  # of 20 tokens of the longest row
    assert not caplog.text
    monkeypatch.delitem(routes.BACKENDS, "triton")
    assert_right(inputs(), window=20)
    for name, message in zip(ALL, caplog.messages, strict=True):
        assert f"{name} is disabled for head sizes 16 and 16: " in message


def prepared(query, _, value, __, **options):
    """The backend that is kept for a call."""
    options = AttentionOptions(query.shape[2] ** -0.5, options.get("window"), options.get("softcap"))
    return routes.prepare(query, value, ROWS, options).backend


@pytest.mark.parametrize("window", [None, 6])
def test_a_layout_is_prepared_once_for_all_layers_and_passes(window, libraries, monkeypatch):
    assert_right(inputs(), window=window)
    for place in ((routes, "chosen"), (device_layout, "Rows"), (flash, "varlen_layout"), (inspect, "signature")):
        monkeypatch.setattr(*place, raising(AssertionError("prepared again")))
    for _ in range(2):
        assert_right(inputs(), window=window)
    with pytest.raises(AssertionError, match="prepared again"):
        packed_attention(*inputs()[:3], ROWS, window=5)


@pytest.mark.parametrize("name", ALL)
def test_other_rows_are_written_where_two_models_have_called_a_library(name, libraries, monkeypatch):
    """As before CUDA graphs of both are replayed."""
    monkeypatch.setenv(routes.VARIABLE, name)
    other = torch.tensor([[0, 0, 0, 7], [0, 5, 7, 9], [16, 0, 16, 17]], dtype=torch.int32, device="cpu")
    (query, _, value, _), options = inputs(), AttentionOptions(0.25, None, None)
    expected = routes.prepare(query, value, other, options).layout.contents
    for rows in (ROWS.clone(), ROWS.clone()):
        layout = routes.prepare(query, value, rows, options).layout
        assert routes.refill(rows_of(rows, 33), rows_of(other, 33))
        assert torch.equal(layout.contents.cu_keys, expected.cu_keys)
        assert torch.equal(layout.contents.places.index, expected.places.index)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Tunes on the CPU: the times of backends, in milliseconds."""
    times = {"flash-attn-3": 3.0, "flash-attn-4": 2.0, "flash-attn-2": 1.0, "torch": 1.5, "triton": 4.0}

    def milliseconds(candidate, device):
        if candidate.name != "triton":  # interpreted elsewhere
            candidate.run()
        return times[candidate.name]

    monkeypatch.setattr(tuning, "TUNED_DEVICES", ("cpu",))
    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    monkeypatch.setattr(routes, "LEAST_TUNED", 0)
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    tuning.choices.clear()
    yield times
    tuning.choices.clear()


def test_wrong_libraries_are_not_timed_and_none_where_one_is_named(installed, tuned, monkeypatch):
    installed(faults=("no softcap",))
    assert prepared(*inputs(), softcap=2.0) == "triton"
    assert prepared(*inputs()) == "flash-attn-2"
    assert [choice.timed for choice in tuning.choices.values()] == [["triton"], [*sorted(tuned, key=tuned.get)]]
    assert "packed_attention torch.float16 T 64 H 4 H_kv 2 D 16 D_v 16 windowed False capped False" in {
        call.noted for call in tuning.choices
    }
    tuning.choices.clear()
    monkeypatch.setenv(routes.VARIABLE, "flash-attn-3")
    assert prepared(*inputs()) == "flash-attn-3"
    assert not tuning.choices


def test_tuning_does_not_time_the_host_that_prepares_a_layout(libraries, tuned, monkeypatch):
    describe, described = flash.varlen_layout, []

    def recording(rows):
        described.append(rows.tokens == 33)
        return describe(rows)

    monkeypatch.setattr(flash, "varlen_layout", recording)
    assert_right(inputs())
    assert sum(described) == len(ALL) + 1  # each candidate, and the route


def test_a_prepared_layout_follows_the_settings(libraries, tuned, monkeypatch):
    """The stand-ins check that the backward is asked for a deterministic result."""
    for deterministic, name in ((False, "flash-attn-2"), (True, "flash-attn-3"), (False, "flash-attn-2")):
        torch.use_deterministic_algorithms(deterministic)
        assert prepared(*inputs()) == name
        assert_right(inputs())
    monkeypatch.setenv(tuning.VARIABLE, "0")
    assert prepared(*inputs()) == "flash-attn-3"
    monkeypatch.setenv(routes.VARIABLE, "flash-attn-4")
    assert prepared(*inputs()) == "flash-attn-4"
    assert_right(inputs())
    monkeypatch.delenv(routes.VARIABLE)
    assert prepared(*inputs()) == "flash-attn-3"


def fail(monkeypatch, name, method, error):
    """Has the forward or the backward of a library raise an error from now on, and returns what counts its calls."""
    failing = Mock(side_effect=error)
    functions, _ = flash.load(routes.BACKENDS[name])
    monkeypatch.setattr(functions, method, failing)
    return failing


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_library_that_fails_in_a_step_is_replaced_once(method, libraries, monkeypatch, caplog):
    assert_right(inputs())
    failing = fail(monkeypatch, ALL[0], method, RuntimeError("no kernel image"))
    for _ in range(2):
        assert_right(inputs())
    assert failing.call_count == 1
    assert chosen(*inputs()) == "flash-attn-4"
    (message,) = caplog.messages
    replaced = "packed_attention: flash-attn-3 has failed and is replaced by flash-attn-4"
    assert message == f"fastdpo: {replaced}: RuntimeError: no kernel image"
    fail(monkeypatch, ALL[1], method, RuntimeError("no kernel image either"))
    with pytest.raises(RuntimeError, match="no kernel image either"):
        assert_right(inputs())


def test_a_library_that_fails_with_a_window_that_hides_nothing_is_replaced_without_one(libraries, monkeypatch):
    assert_right(inputs(), window=20)
    failing = fail(monkeypatch, ALL[0], "forward", RuntimeError("no kernel image"))
    assert_right(inputs(), window=20)
    assert_right(inputs())
    assert failing.call_count == 1
    assert routes.replaced == {kind(): "flash-attn-3"}


@pytest.mark.parametrize(
    ("error", "named"), [(torch.OutOfMemoryError("no kernel image"), ""), (RuntimeError("no kernel image"), ALL[0])]
)
def test_errors_that_replace_no_library(error, named, libraries, monkeypatch, caplog):
    """Running out of memory is no fault of it, and one that is named is wanted."""
    monkeypatch.setenv(routes.VARIABLE, named)
    assert_right(inputs())
    fail(monkeypatch, ALL[0], "forward", error)
    for _ in range(2):
        with pytest.raises(type(error), match="no kernel image"):
            assert_right(inputs())
    assert chosen(*inputs()) == ALL[0]
    assert not caplog.text


@pytest.mark.parametrize("strict", ["0", "1"])
def test_plain_products_take_the_place_of_the_last_backend(strict, libraries, monkeypatch, caplog):
    monkeypatch.setenv("FASTDPO_STRICT", strict)
    for name in {*routes.BACKENDS} - {"torch"}:
        monkeypatch.delitem(routes.BACKENDS, name)
    assert_right(inputs())
    fail(monkeypatch, "torch", "forward", RuntimeError("no kernel image"))
    if strict == "1":
        with pytest.raises(NotFused, match="torch has failed and is replaced by plain matrix products: RuntimeError"):
            assert_right(inputs())
        return
    for _ in range(2):
        assert_right(inputs())
    assert caplog.text.count("torch has failed and is replaced by plain matrix products") == 1


def test_a_measured_choice_that_fails_is_not_made_again(libraries, tuned, monkeypatch, caplog):
    assert_right(inputs())
    assert chosen(*inputs()) == "flash-attn-2"
    fail(monkeypatch, "flash-attn-2", "backward", RuntimeError("no kernel image"))
    assert_right(inputs())
    assert chosen(*inputs()) == prepared(*inputs()) == "torch"
    assert "flash-attn-2 has failed and is replaced by torch: RuntimeError: no kernel image" in caplog.text
    (noted,) = notes.read(CPU).choices.values()
    assert noted["name"] == "torch"
    assert noted["measured"]["flash-attn-2"] == "RuntimeError: no kernel image"
    tuning.choices.clear()  # another process
    routes.forget()
    assert chosen(*inputs()) == "torch"


def build(version):
    """A build from the Kernels Hub: the module with its functions."""
    module = ModuleType("_build_1a2b3c.flash_attn_interface")
    vars(module).update(flash_libraries.functions_of(recorded()[version], flash_libraries.VarlenAttention()))
    return module


@pytest.mark.parametrize("version", [name for name in recorded() if name.startswith("kernels-community/")])
def test_a_build_from_the_hub_is_the_backend_of_its_library(version, libraries, monkeypatch):
    backend = recorded()[version].backend
    monkeypatch.setitem(sys.modules, flash.PACKAGES[backend].module_name, None)  # not installed
    monkeypatch.setenv(routes.VARIABLE, backend)
    before = notes.environment(CPU)
    with pytest.raises(NotImplementedError, match=f"got {backend}: ModuleNotFoundError"):
        assert_right(inputs())
    flash.use_build(build(version))
    assert_right(inputs())
    changed = {name for name, x in notes.environment(CPU).items() if before[name] != x}
    assert changed == {"hub"}
    assert notes.environment(CPU)["hub"] == f"{backend} as _build_1a2b3c.flash_attn_interface"


def test_a_build_without_a_backward_is_ignored(libraries, monkeypatch):
    monkeypatch.setitem(sys.modules, flash.PACKAGES["flash-attn-3"].module_name, None)
    flash.use_build(SimpleNamespace(_flash_attn_forward=lambda q, k, v, cu_seqlens_q: None))
    assert chosen(*inputs()) == "flash-attn-4"
