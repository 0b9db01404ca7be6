"""`fastdpo.prepare`, `score` and `restore`, compared with the log-probabilities of the model's own logits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import AdaptionPromptConfig, LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, DynamicCache

import fastdpo
from fastdpo.ops.head.results import STATISTICS
from fastdpo.packing import IGNORE_INDEX
from tests.support.comparison import assert_close, assert_same_gradients, double
from tests.support.models.families import tiny_family
from tests.support.models.multimodal import IMAGE, tiny_multimodal
from tests.support.trl.dpo import tiny_model
from tests.support.trl.dpo import train as train_dpo

FUSED, STOCK = ("fastdpo.score", "policy", "fused"), ("fastdpo.score", "policy", "stock")
FAMILIES = ["llama", "llama-tied", "gemma2", "granite", "cohere2", "phi", "gpt2", "falcon_h1", "qwen3_moe"]


def rows(left: bool = False) -> dict[str, torch.Tensor]:
    """Two pairs, chosen rows first, of rows of different lengths, padded on either side."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (4, 12), generator=generator)
    ids[2:, :6] = ids[:2, :6]
    lengths = torch.tensor([12, 10, 9, 12])
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :5] = IGNORE_INDEX
    batch = dict(input_ids=ids * mask, attention_mask=mask, labels=labels)
    if left:
        moved = [[x[i].roll(12 - int(lengths[i])) for i in range(4)] for x in batch.values()]
        batch = {name: torch.stack(x) for name, x in zip(batch, moved, strict=True)}
    return batch


def own_logps(model, input_ids, attention_mask, labels, **kwargs) -> torch.Tensor:
    """The log-probabilities [R, L-1] as trainers compute them."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).logits[:, :-1]
    targets = labels[:, 1:]
    logps = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets != IGNORE_INDEX, logps, 0.0)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def step(model, logps: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a loss of the log-probabilities."""
    chosen, rejected = logps.sum(1).chunk(2)
    F.softplus(rejected - chosen).mean().backward()
    return gradients(model)


def test_a_step_after_an_evaluation_in_inference_mode():
    """Of the same batch: autograd saves tensors of its layout."""
    model, batch = fastdpo.prepare(tiny_model()), rows()
    with torch.inference_mode():
        expected = fastdpo.score(model, **batch).logps
    logps = fastdpo.score(model, **batch).logps
    assert torch.equal(logps, expected)
    assert step(model, logps)


@pytest.fixture(params=[lambda model: model, copy.deepcopy], ids=["fused", "fallen back"])
def on_path(request):
    """What keeps a prepared model fused, or makes it fall back, as a copy of it does."""
    return request.param


def score(model, path=FUSED, **batch):
    """The scored rows of a call that takes a path."""
    before = fastdpo.calls.copy()
    scored = fastdpo.score(model, **batch)
    assert fastdpo.calls - before == {path: 1}
    return scored


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_equal_those_of_the_models_own_logits(name):
    model, batch = tiny_family(name).eval(), rows()  # GPT-2 has dropout
    expected = own_logps(model, **batch)
    stock = step(model, expected)
    assert fastdpo.prepare(model) is model
    scored = score(model, **batch)
    assert_close(scored.logps, expected, absolute=1e-5)
    assert torch.equal(scored.mask, batch["labels"][:, 1:] != IGNORE_INDEX)
    assert_close(scored.sums(), expected.sum(1), absolute=1e-5)
    assert scored.counts().tolist() == (batch["labels"] != IGNORE_INDEX).sum(1).tolist()
    exact = double(tiny_family(name)).eval()
    truth = step(exact, own_logps(exact, **batch))
    for key, gradient in step(model, scored.logps).items():  # as near to float64 as the model's own, up to a factor
        unit, error = truth[key].norm(), (gradient - truth[key]).norm()
        assert error <= 4 * (stock[key] - truth[key]).norm() + 2e-5 * unit + 1e-7, key


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_both_paths_have_the_same_statistics(name):
    model, batch = fastdpo.prepare(tiny_family(name), outputs=STATISTICS), rows()
    with torch.no_grad():
        fused = fastdpo.score(model, **batch)
        fallen = fastdpo.score(copy.deepcopy(model), **batch)
    logged = []
    for scored in (fused, fallen):
        means = fastdpo.metrics.PreferenceMeans()
        means.update_tokens(scored.tokens, scored.mask)
        logged.append({key: x for key, x in means.compute().items() if x == x})
    assert len(logged[0]) == 4
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    for name in ("logps", *STATISTICS):
        assert_close(getattr(fused, name).float(), getattr(fallen, name).float(), absolute=1e-4)
    assert torch.equal(fused.mask, fallen.mask)


def test_a_model_that_falls_back_yields_the_same_rows(caplog, monkeypatch):
    batch = rows()
    model = tiny_model(alibi=True)
    expected = own_logps(model, **batch)
    stock = step(model, expected)
    fastdpo.prepare(model)
    scored = score(model, STOCK, **batch)
    assert_close(scored.logps, expected)
    assert_same_gradients([stock], [step(model, scored.logps)])
    fastdpo.score(model, **batch)
    assert caplog.text.count("fastdpo.score (policy): not fused, ") == 1
    assert "[alibi]" in caplog.text
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(fastdpo.NotFused, match="alibi"):
        fastdpo.score(model, **batch)


def test_lora_before_and_after_prepare():
    batch, config = rows(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), config)
    expected = own_logps(model, **batch)
    stock = step(model, expected)
    fastdpo.prepare(model)
    assert_close(fastdpo.score(model, **batch).logps, expected, absolute=1e-5)
    assert_same_gradients([stock], [step(model, fastdpo.score(model, **batch).logps)])
    torch.manual_seed(0)
    later = get_peft_model(fastdpo.prepare(tiny_model()), config)
    assert_close(score(later, **batch).logps, expected, absolute=1e-5)
    with model.disable_adapter(), torch.no_grad():
        assert_close(fastdpo.score(model, **batch).logps, own_logps(model, **batch), absolute=1e-5)


def test_a_wrapper_that_has_kept_an_earlier_forward(caplog):
    adapter = AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")
    model, batch = get_peft_model(tiny_model(num_key_value_heads=4), adapter), rows()
    expected = own_logps(model, **batch)
    before = fastdpo.calls.copy()
    for _ in range(2):
        assert_close(fastdpo.score(fastdpo.prepare(model), **batch).logps, expected)
    assert fastdpo.calls - before == {STOCK: 2}
    assert caplog.text.count("its forward was not called: a wrapper has kept an earlier one") == 2


def test_prepared_again_copied_and_restored():
    batch, model = rows(), tiny_model()
    fastdpo.prepare(model, outputs=("entropy",))
    assert fastdpo.score(model, **batch).entropy is not None
    fastdpo.prepare(model)
    assert fastdpo.score(model, **batch).entropy is None
    copied = copy.deepcopy(model)
    score(copied, STOCK, **batch)
    score(fastdpo.prepare(copied), **batch)
    fresh = vars(tiny_model())
    for each in (model, copied, model):
        assert fastdpo.restore(each) is each
        assert vars(each).keys() == fresh.keys()
        assert each.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"^score: model must be prepared by fastdpo.prepare\(model\); got LlamaFor"):
        fastdpo.score(model, **batch)


def test_models_of_a_patched_trainer(tmp_path):
    model = tiny_model()
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = train_dpo(tmp_path, model, tiny_model(seed=1), max_steps=1, evaluate=0)
        with pytest.raises(ValueError, match=r"^prepare: model must not belong to a patched trainer.* trl.DPOTrainer"):
            fastdpo.prepare(model)
        expected = own_logps(model, **rows())
        copied = fastdpo.prepare(copy.deepcopy(model))  # with the forward that TRL has given it
        assert_close(score(copied, FUSED, **rows()).logps, expected, absolute=1e-5)
    assert trainer.steps == 1


class ValueHead(torch.nn.Module):
    """A wrapper of a user's, which returns something else than the output of its model."""

    def __init__(self, returned):
        super().__init__()
        self.pretrained_model, self.returned = tiny_model(), returned

    def forward(self, **kwargs):
        return self.returned(self.pretrained_model(**kwargs))


RETURNED = {
    "logits": lambda output: output.logits,
    "a dict": lambda output: {"logits": output.logits, "loss": None},
    "a tuple": lambda output: (output.logits, output.logits[..., 0]),
    "values of hidden states": lambda output: output.hidden_states[-1],
}


@pytest.mark.parametrize("returned", RETURNED)
def test_wrappers_that_return_something_else_are_refused(returned, on_path):
    model = ValueHead(RETURNED[returned])
    with pytest.raises(TypeError, match=r"^prepare: model must be a transformers model, or .* inside; got a ValueHead"):
        fastdpo.prepare(model)
    fastdpo.prepare(model.pretrained_model)
    model = on_path(model)
    with pytest.raises(TypeError, match=r"^score: model must return the output of the transformers model inside"):
        fastdpo.score(model, **rows())
    model.returned = lambda output: output
    assert_close(fastdpo.score(model, **rows()).logps, own_logps(model, **rows()), absolute=1e-5)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(logits_to_keep=11), ValueError, "logits_to_keep must be left out, since .*; got 11"),
        (dict(num_logits_to_keep=11), ValueError, "num_logits_to_keep must be left out"),
        (dict(return_dict=False), ValueError, "return_dict must be left out, since .*; got False"),
        (dict(output_hidden_states=True), ValueError, "output_hidden_states must be left out"),
        (dict(use_cache=True), ValueError, "use_cache must be left out"),
        (dict(past_key_values=DynamicCache()), ValueError, "past_key_values must be left out, .*; got a DynamicCache"),
        (dict(outputs=("entropy",)), TypeError, r"outputs must be given to fastdpo.prepare; got \('entropy',\)"),
        (dict(average_log_prob=True), TypeError, "average_log_prob must be an argument of score or of the model's"),
    ],
)
def test_arguments_that_would_change_the_result_or_nothing_are_refused(given, error, message, on_path):
    model = on_path(fastdpo.prepare(tiny_model()))
    with pytest.raises(error, match=rf"^score: {message}"):
        fastdpo.score(model, **rows(), **given)
    neutral = dict.fromkeys(given, None) if error is ValueError else dict(return_dict=True, use_cache=False)
    assert_close(fastdpo.score(model, **rows(), **neutral).logps, own_logps(model, **rows()), absolute=1e-5)


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state()  # it keeps the precision of an earlier trainer
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state()


def test_a_model_that_accelerate_has_prepared(accelerator):
    """In bfloat16: its wrappers of the forward autocast."""
    batch = rows()
    with torch.autocast("cpu", torch.bfloat16):
        expected = fastdpo.score(fastdpo.prepare(tiny_model()), **batch).logps
    model = fastdpo.prepare(accelerator.prepare(tiny_model()))
    assert torch.equal(score(model, **batch).logps, expected)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])  # the functions of mixers are probed, too
def test_another_default_dtype(name, default_dtype):
    """Of the process, by which tensors of probes would be made, too."""
    model, batch = fastdpo.prepare(tiny_family(name).float()), rows()
    assert_close(score(model, **batch).logps, own_logps(model, **batch), absolute=1e-5)


def test_the_auxiliary_loss_of_routers(on_path):
    model, batch = tiny_family("qwen3_moe"), rows()
    output = model(**{k: x for k, x in batch.items() if k != "labels"}, output_router_logits=True)
    model = on_path(fastdpo.prepare(model))
    scored = fastdpo.score(model, **batch, output_router_logits=True)
    assert_close(scored.aux_loss, output.aux_loss, relative=1e-4)
    assert fastdpo.score(model, **batch).aux_loss is None


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_images(order):
    model = fastdpo.prepare(tiny_multimodal("llava"))
    answers = rows()["input_ids"][:, 5:] % 90 + 1
    answers[2:, 0] = answers[:2, 0]
    ids = torch.cat([torch.tensor([[1] + 16 * [IMAGE]] * 4), answers], 1)
    labels = ids.clone()
    labels[:, :18] = IGNORE_INDEX
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, pixel_values=pixels)
    if order == "interleaved":
        batch = {name: x[[0, 2, 1, 3]] for name, x in batch.items()}
    assert_close(score(model, **batch).logps, own_logps(model, **batch), absolute=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("places", [([0], 8), ([0, 2], 2)], ids=["answer", "prompt"])
def test_non_finite_values_stay_within_their_pair(places, value):
    """Stock keeps them within a row; with a shared prompt, both rows of the pair may get them."""
    model, batch = fastdpo.prepare(tiny_model()), rows()
    batch["input_ids"][batch["input_ids"] == 90] = 91
    batch["input_ids"][places] = 90
    score(model, **batch)
    model.model.embed_tokens.weight.data[90] = value
    expected, found = own_logps(model, **batch), score(model, **batch).logps
    has_it = (batch["input_ids"] == 90).any(1)
    assert expected[has_it].sum(1).isnan().all()
    assert found[has_it].sum(1).isnan().all()
    assert_close(found[[1, 3]], expected[[1, 3]], absolute=1e-5)


# The forms of rows.


def test_padded_on_either_side_without_a_mask_and_with_positions():
    model, batch = fastdpo.prepare(tiny_model()), rows()
    expected = own_logps(model, **batch).sum(1)
    left = rows(left=True)
    counted = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    without = {name: x for name, x in batch.items() if name != "attention_mask"}
    arguments = [left, {**left, "position_ids": counted}, without, {**without, "position_ids": torch.arange(12)[None]}]
    for each in arguments:
        assert_close(score(model, **each).sums(), expected, absolute=1e-5)
    with pytest.raises(ValueError, match=r"^score: attention_mask must be given for rows that are padded on the left"):
        fastdpo.score(model, left["input_ids"], labels=left["labels"])


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_padding_on_the_left_is_what_the_model_takes_it_for(name):
    """The positions of GPT-2 count it, and those of OPT do not."""
    model, batch = tiny_family(name).eval(), rows(left=True)
    expected = own_logps(model, **batch)
    stock = step(model, expected)
    fastdpo.prepare(model)
    logps = score(model, **batch).logps
    assert_close(logps, expected, absolute=1e-5)
    found = step(model, logps)
    assert_same_gradients(*([{"all": torch.cat([x.flatten() for x in y.values()])}] for y in (stock, found)))
    right = own_logps(model, **rows()).sum(1)
    assert (name == "opt") == torch.allclose(right, expected.sum(1), atol=1e-4)
    counted = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)  # given positions decide
    expected = own_logps(model, **batch, position_ids=counted)
    assert_close(fastdpo.score(model, **batch, position_ids=counted).logps, expected, absolute=1e-5)


def test_a_recurrence_that_reads_padding_on_the_left(caplog):
    model = tiny_family("recurrent_gemma").bfloat16()
    expected = own_logps(model, **rows(left=True))
    fastdpo.prepare(model)
    score(model, **rows())
    assert_close(fastdpo.score(model, **rows(left=True)).logps, expected.float(), absolute=0.05)
    assert "RecurrentGemmaForCausalLM depend on the padding before them [left-padding]" in caplog.text


def test_other_positions_fall_back():
    model, batch = fastdpo.prepare(tiny_family("gpt2").eval()), rows()
    batch["position_ids"] = torch.arange(3, 15)[None]
    assert_close(score(model, STOCK, **batch).logps, own_logps(model, **batch))


def flat() -> dict[str, torch.Tensor]:
    """The rows as collators without padding return them."""
    batch = rows()
    real = batch["attention_mask"] != 0
    labels = batch["labels"].clone()
    labels[:, 0] = IGNORE_INDEX
    positions = torch.arange(12).expand(4, 12)[real]
    bounds = F.pad(real.sum(1).cumsum(0), (1, 0))
    ids, labels = batch["input_ids"][real], labels[real]
    return dict(input_ids=ids[None], labels=labels[None], cu_seqlens=bounds, position_ids=positions[None])


def test_flat_rows_and_lists(on_path):
    model, batch, of_flat = fastdpo.prepare(tiny_model()), rows(), flat()
    expected = own_logps(model, **batch)
    model = on_path(model)
    assert_close(fastdpo.score(model, **of_flat).logps, expected, absolute=1e-5)
    real = batch["attention_mask"] != 0
    lists = [[x[i][real[i]].tolist() for i in range(4)] for x in (batch["input_ids"], batch["labels"])]
    assert_close(fastdpo.score(model, lists[0], labels=lists[1]).logps, expected, absolute=1e-5)
    features = [dict(input_ids=x, labels=y) for x, y in zip(*lists, strict=True)]
    for options in (dict(), dict(return_flash_attn_kwargs=True, return_seq_idx=True)):
        collated = DataCollatorWithFlattening(**options)(features)
        assert_close(fastdpo.score(model, **collated).logps, expected, absolute=1e-5)
    with pytest.raises(ValueError, match=r"^score: position_ids must count from 0 in each row of cu_seqlens"):
        fastdpo.score(model, **DataCollatorWithFlattening(position_ids_start=2)(features))
    with pytest.raises(ValueError, match=r"^score: position_ids must count from 0 in each row of cu_seqlens"):
        fastdpo.score(model, **{**of_flat, "position_ids": torch.arange(43)[None]})
    with pytest.raises(ValueError, match=r"^score: cu_seqlens must rise from 0 to the number of tokens, 43"):
        fastdpo.score(model, **{**of_flat, "cu_seqlens": of_flat["cu_seqlens"][:-1]})


def test_shifted_labels_are_said_by_name():
    model, batch = fastdpo.prepare(tiny_model()), rows()
    expected = own_logps(model, **batch)
    labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORE_INDEX)
    assert_close(fastdpo.score(model, **batch, shift_labels=labels).logps[:, :-1], expected, absolute=1e-5)
    for each in (model, copy.deepcopy(model)):  # which falls back
        with pytest.raises(ValueError, match=r"^score: labels must not be shifted without shifted=True; got"):
            fastdpo.score(each, **batch, labels=labels)
    fastdpo.prepare(model, shifted=True)
    assert_close(fastdpo.score(model, **batch, labels=labels).logps[:, :-1], expected, absolute=1e-5)
    for _ in range(2):  # in the first call and later
        with pytest.raises(ValueError, match=r"^score: labels must be shifted with shifted=True; got labels that are"):
            fastdpo.score(model, **rows())
    fastdpo.prepare(model)
    unshifted = rows()
    with pytest.raises(ValueError, match=r"^score: shift_labels must be shifted with shifted=True; got labels that"):
        fastdpo.score(model, shift_labels=unshifted.pop("labels"), **unshifted)
    with pytest.raises(ValueError, match=r"^score: labels must be given, or shift_labels in their place; got"):
        fastdpo.score(model, **batch)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(input_ids=None), TypeError, "input_ids must be a tensor, or a list of the ids of each row"),
        (dict(input_ids=[["a"]], attention_mask=None), TypeError, "input_ids must be a tensor, or a list of"),
        (dict(input_ids=[], labels=[], attention_mask=None), ValueError, "input_ids must have a row; got no rows"),
        (dict(labels=[[1, 2]]), TypeError, "labels must be a tensor"),
        (dict(labels=torch.zeros(4, 12)), TypeError, "labels must be int32 or int64"),
        (dict(labels=torch.full((4, 12), -7)), ValueError, "labels must be -100 or"),
        (dict(labels=torch.full((4, 12), 97)), ValueError, "labels must be -100 or"),
        (dict(attention_mask=torch.ones(4, 11)), ValueError, r"attention_mask must be \[4, 12\]; got \[4, 11\]"),
        (dict(attention_mask=[1]), TypeError, r"attention_mask must be a tensor; got \[1\]"),
        (dict(attention_mask=torch.full((4, 12), 0.5)), ValueError, "attention_mask must be bool, int, or floating"),
        (dict(labels=torch.zeros(4, 11, dtype=torch.long)), ValueError, r"labels must be \[4, 12\]; got \[4, 11\]"),
        (dict(input_ids=torch.zeros(48, dtype=torch.long)), ValueError, r"input_ids must be \[R, L\]"),
        (dict(input_ids=[[1, 2], []], labels=[[1, 2], [3]], attention_mask=None), ValueError, "labels must be rows of"),
        (dict(cu_seqlens=torch.tensor([0, 48])), ValueError, "attention_mask must be None for rows"),
    ],
)
def test_rows_are_checked(changes, error, message):
    changes = {**rows(), **changes}
    changes["attention_mask"] = None if isinstance(changes["input_ids"], type(None)) else changes["attention_mask"]
    with pytest.raises(error, match=rf"^score: {message}"):
        fastdpo.score(fastdpo.prepare(tiny_model()), **changes)


def test_the_mean_of_a_row_without_labels_is_zero(on_path):
    model, batch = on_path(fastdpo.prepare(tiny_model())), rows()
    batch["labels"][2] = IGNORE_INDEX
    scored = fastdpo.score(model, **batch)
    assert torch.equal(scored.means()[[0, 1, 3]], (scored.sums() / scored.counts())[[0, 1, 3]])
    assert scored.means()[2] == 0
    scored.means().sum().backward()
    assert all(x.isfinite().all() for x in gradients(model).values())


@pytest.mark.parametrize("groups", ["content", "pairs"])
def test_interleaved_rows(groups):
    model, batch = fastdpo.prepare(tiny_model(), groups=groups), rows()
    halves = fastdpo.score(model, **batch).halves()
    interleaved = {name: x[[0, 2, 1, 3]] for name, x in batch.items()}
    for a, b in zip(halves, fastdpo.score(model, **interleaved).halves("interleaved"), strict=True):
        assert_close(a.sums(), b.sums(), absolute=1e-5)
    with pytest.raises(ValueError, match=r"^halves: order must be one of"):
        fastdpo.score(model, **batch).halves("in turn")
    with pytest.raises(ValueError, match=r"^ScoredRows: mean_logits must be requested, as by fastdpo.prepare"):
        fastdpo.score(model, **batch).mean_logit()
    with pytest.raises(ValueError, match=r"^halves: rows must be pairs; got 3"):
        fastdpo.score(model, **{name: x[:3] for name, x in batch.items()}).halves()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(groups="prompts"), ValueError, "prepare: groups must be one of"),
        (dict(outputs="entropy"), ValueError, "prepare: outputs must be a sequence of names"),
        (dict(shifted="no"), TypeError, "prepare: shifted must be"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=rf"^{message}"):
        fastdpo.prepare(tiny_model(), **options)
    with pytest.raises(TypeError, match=r"^prepare: model must be or hold a transformers.PreTrainedModel"):
        fastdpo.prepare(torch.nn.Linear(2, 2))
