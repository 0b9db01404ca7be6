"""What `pack` refuses, fills up and reads, and one layout in full. tests/fuzz compares random ones with a loop."""

import pytest
import torch

from fastdpo import packing
from fastdpo.packing import IGNORE_INDEX, NotPackable, pack, pack_pairs
from tests.support.layouts import assert_layout_is_right

# Tests describe a row of a batch by its ids and, for each id, its label or None.
PROMPT = [5, 6, 7, 8]


def padded(rows, left=(), length=None):
    """The input_ids, attention_mask and labels [R, L] of rows (ids, labels).

    `left` lists the rows that are padded on the left.
    """
    length = max(len(ids) for ids, _ in rows) if length is None else length
    batch = torch.zeros(3, len(rows), length, dtype=torch.long)
    batch[2] = IGNORE_INDEX
    for r, (ids, labels) in enumerate(rows):
        start = length - len(ids) if r in left else 0
        span = slice(start, start + len(ids))
        batch[0, r, span] = torch.tensor(ids, dtype=torch.long)
        batch[1, r, span] = 1
        batch[2, r, span] = torch.tensor([IGNORE_INDEX if y is None else y for y in labels], dtype=torch.long)
    return tuple(batch)


def scored_answer(prompt, answer):
    """A row in which the answer is scored and the prompt is not."""
    return prompt + answer, [None] * len(prompt) + answer


@pytest.mark.parametrize(
    ("tokens", "reach", "lengths"), [(7, None, []), (8, 9, [1]), (12, 9, [5]), (21, None, [6, 6, 2])]
)
def test_tokens_are_filled_up_with_rows_that_nothing_scores(tokens, reach, lengths):
    batch = padded([scored_answer(PROMPT, [1, 2, 3]), scored_answer(PROMPT, [2, 1])], length=9)
    plain, layout = pack_pairs(*batch), pack(*batch, groups="pairs", tokens=tokens, reach=reach)
    idle = layout.rows[len(plain.rows) :]
    assert idle[:, 3].tolist() == lengths  # none longer than the longest row, whose last token is not stored
    assert idle[:, 2].tolist() == [7 + sum(lengths[:i]) for i in range(len(lengths))]
    assert not idle[:, 1].any()
    expected = [*plain.position_ids.tolist(), *(i for n in lengths for i in range(n))]
    assert layout.position_ids[:-1].tolist() == expected[:-1]
    assert layout.position_ids[-1] == (expected[-1] if reach is None else reach - 1)
    assert layout.pack(batch[0])[0, 7:].tolist() == [*[5, 6, 7, 8, 1, 2, 2] * 2][: tokens - 7]
    assert layout.multiplicity.tolist() == [*plain.multiplicity.tolist(), *[0] * (tokens - 7)]
    for name in ("score_index", "targets", "output_index", "output_source", "label_bounds"):
        assert torch.equal(getattr(layout, name), getattr(plain, name))


@pytest.mark.parametrize(("reach", "least"), [(None, 7), (9, 8)])
def test_too_few_tokens_raise(reach, least):
    batch = padded([scored_answer(PROMPT, [1, 2, 3]), scored_answer(PROMPT, [2, 1])], length=9)
    message = f"^pack: tokens must be at least {least} for this batch; got {least - 1}"
    with pytest.raises(ValueError, match=message):
        pack(*batch, groups="pairs", reach=reach, tokens=least - 1)


def test_large_ids_survive_merging():
    top = 2**31 - 1
    layout = pack_pairs(*padded([([top, top, 0, top], [None, top, 0, top])] * 2))
    assert sorted(zip(layout.score_index.tolist(), layout.targets.tolist(), strict=True)) == [
        (0, top),
        (1, 0),
        (2, top),
    ]


# The dtypes of masks that collators return.
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_other_dtypes(mask_dtype):
    ids, mask, labels = padded([scored_answer(PROMPT, [1, 2, 3]), scored_answer(PROMPT, [2, 1])])
    layout, expected = pack_pairs(ids.int(), mask.to(mask_dtype), labels.int()), pack_pairs(ids, mask, labels)
    for name, value in vars(expected).items():
        field = getattr(layout, name)
        assert (
            field == value
            if isinstance(value, tuple | int)
            else (torch.equal(field, value) and field.dtype == value.dtype)
        )


def test_unpack_takes_values_in_the_order_of_labels_where_nothing_is_merged():
    ids, mask, labels = padded([(PROMPT, [None, 1, 2, 3]), (PROMPT, [None, 4, 5, None])])
    layout = pack_pairs(ids, mask, labels)
    assert len(layout.score_index) == len(layout.label_index)
    expected = labels[:, 1:].clamp(min=0)
    for targets in (layout.labels, layout.targets):
        assert torch.equal(layout.unpack(targets), expected)
    merged = pack_pairs(*padded([(PROMPT, [None, 1, 2, 3]), (PROMPT, [None, 1, 9, None])]))
    assert len(merged.score_index) < len(merged.label_index)
    assert torch.equal(merged.unpack(merged.labels), merged.unpack(merged.targets))


def test_pairs_whose_rows_come_in_turn_are_refused():
    rows = [scored_answer(prompt, answer) for prompt in (PROMPT, [9, 8, 7]) for answer in ([1, 2], [3])]
    with pytest.raises(ValueError, match=r"^pack_pairs: input_ids must have all chosen rows first; got"):
        pack_pairs(*padded(rows))
    content = pack(*padded(rows), groups="content")
    halves = pack_pairs(*padded(rows[::2] + rows[1::2]))
    assert len(content.token_index) == len(halves.token_index) < content.unshared
    pack_pairs(*padded(rows), share=False)


@pytest.mark.parametrize("answer", [[1, 2, 3], [4, 4, 5]])  # in the latter, both forms have a label in common
def test_labels_of_the_other_form_are_refused(answer):
    ids, mask, labels = padded([scored_answer(PROMPT, answer), scored_answer(PROMPT, [2, 1])])
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    assert pack(ids, mask, shifted, shifted=True).targets.tolist() == pack(ids, mask, labels).targets.tolist()
    with pytest.raises(ValueError, match=r"^pack: labels must not be shifted without shifted=True; got"):
        pack(ids, mask, shifted)
    with pytest.raises(ValueError, match=r"^pack: labels must be shifted with shifted=True; got labels that are not"):
        pack(ids, mask, labels, shifted=True)
    pack(ids, mask, torch.where(labels == IGNORE_INDEX, labels, 6))  # labels that are no ids at all


def test_unpack_is_differentiable():
    layout = pack_pairs(*padded([(PROMPT, [None, 1, 2, 3]), (PROMPT, [None, 1, 9, None])]))
    scored = torch.randn(len(layout.targets), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.unpack, scored)
    layout.unpack(scored).sum().backward()
    readers = torch.bincount(layout.output_source, minlength=len(scored))
    # The position that both rows score with the same label is read twice.
    assert sorted(readers.tolist()) == [1, 1, 1, 2]
    assert torch.equal(scored.grad, readers.double())


def test_a_label_after_the_last_token_is_scored_by_it():
    ids, mask, labels = padded([scored_answer(PROMPT, [1, 2])], length=8)
    labels[0, 6] = 3  # an end-of-sequence token that is only in the labels
    layout = pack(ids, mask, labels)
    assert len(layout.token_index) == 6
    assert layout.targets.tolist() == [1, 2, 3]


NOT_PACKABLE = {  # attention mask and labels of one row of four tokens, shifted, reason
    "a hole": ([1, 0, 1, 1], [-100, -100, -100, 3], False, "an attention mask has holes"),
    "two holes": ([1, 0, 1, 0], [-100] * 4, False, "an attention mask has holes"),
    "a label scored by padding before": ([0, 0, 1, 1], [-100, -100, 3, 3], False, "a label is scored by a padding"),
    "a label scored by padding after": ([1, 1, 0, 0], [-100, 3, 3, 3], False, "a label is scored by a padding"),
    "a shifted label on padding": ([1, 1, 0, 0], [3, 3, 3, -100], True, "a label is scored by a padding"),
    "a label of a row without tokens": ([0, 0, 0, 0], [-100, 3, -100, -100], False, "a label is scored by a padding"),
    "no token": ([0, 0, 0, 0], [-100] * 4, False, "all tokens are padding"),
}


@pytest.mark.parametrize("name", NOT_PACKABLE)
def test_unpackable_batches_raise_with_the_reason(name):
    mask, labels, shifted, reason = NOT_PACKABLE[name]
    good = (torch.tensor([1, 1, 1, 1]), torch.tensor([-100, 3, 3, 3]))
    mask, labels = (torch.stack([torch.tensor(x), y]) for x, y in zip((mask, labels), good, strict=True))
    if name == "no token":
        mask, labels = mask[:1], labels[:1]
    with pytest.raises(NotPackable, match=rf"^{reason}"):
        pack(torch.ones_like(mask), mask, labels, shifted=shifted)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)], ids=str)
def test_empty_batches_raise_not_packable(shape):
    empty = torch.zeros(shape, dtype=torch.long)
    for shifted in (False, True):
        with pytest.raises(NotPackable, match="all tokens are padding"):
            pack(empty, empty, empty, shifted=shifted)
    with pytest.raises(NotPackable, match="all tokens are padding"):
        pack_pairs(empty, empty, empty)


def test_layout_methods_compile_fullgraph():
    torch.compiler.reset()
    batch = padded([scored_answer(PROMPT, [1, 2, 3]), scored_answer(PROMPT, [2, 1])])
    layout = pack_pairs(*batch)

    def pack_and_unpack(ids, values):
        return layout.pack(ids), layout.unpack(values)

    arguments = batch[0], torch.randn(len(layout.targets))
    compiled = torch.compile(pack_and_unpack, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(compiled, pack_and_unpack(*arguments), strict=True))


class OnDevice(torch.Tensor):
    """A tensor that records the functions applied to it.

    It stands for a tensor on a GPU, where reading values synchronizes.
    """

    functions: list[str]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.functions.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("shifted", [False, True])
def test_the_batch_is_copied_to_the_host_once(shifted, monkeypatch):
    """Nothing may read values of the batch before that copy or use the batch after it."""
    copies = []
    to_host = packing.to_host

    def copied(*tensors):
        copies.append(len(OnDevice.functions))
        return to_host(*(x.as_subclass(torch.Tensor) for x in tensors))

    monkeypatch.setattr(packing, "to_host", copied)
    monkeypatch.setattr(OnDevice, "functions", [], raising=False)
    batch = padded([scored_answer(PROMPT, [1, 2, 3]), scored_answer(PROMPT, [2, 1])])
    if shifted:
        batch[2][:] = batch[2].roll(-1, 1)
    groups = torch.zeros(2, dtype=torch.long)
    layout = pack(*(x.as_subclass(OnDevice) for x in batch), groups=groups, shifted=shifted)
    assert len(copies) == 1
    metadata = {"__get__", "__len__", "dim", "numel", "size"}  # __get__: attributes such as shape and device
    assert set(OnDevice.functions[: copies[0]]) - metadata <= {"__ne__", "ne", "__getitem__"}
    assert set(OnDevice.functions[copies[0] :]) <= {"as_subclass"}
    assert_layout_is_right(layout, batch, groups, shifted=shifted)


@pytest.mark.parametrize("shifted", [False, True])
def test_padded_layout(shifted):
    ids = torch.randint(1, 50, (4, 7))
    mask = torch.ones_like(ids)
    mask[1, 2], mask[2, 5:], mask[3, :3] = 0, 0, 0  # a hole, and padding on either side
    labels = torch.where(torch.rand(4, 7) < 0.5, ids, -100)
    labels[1] = -100
    layout = packing.padded_layout(ids, mask, labels, shifted)
    assert torch.equal(layout.pack(ids), ids.flatten()[None])
    assert torch.equal(layout.multiplicity, mask.flatten())
    assert torch.equal(layout.position_ids.view(4, 7), torch.arange(7).expand(4, 7))
    assert layout.rows.tolist() == [[7 * i, 0, 7 * i, 7] for i in range(4)]
    logps = torch.randn(4, 7, 50).log_softmax(-1)  # log-probabilities at the predicting positions
    scored = logps.flatten(0, 1)[layout.score_index].gather(1, layout.targets[:, None])[:, 0]
    targets, by_row = (labels, logps) if shifted else (labels[:, 1:], logps[:, :-1])
    expected = by_row.gather(2, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == -100, 0)
    assert torch.equal(layout.unpack(scored), expected)
