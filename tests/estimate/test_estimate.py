"""`fastdpo estimate`: the tokens that TRL would compute, the largest batch that fits, and the command."""

import json
import re
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BloomConfig
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from fastdpo.__main__ import main
from fastdpo.batching import kinship_of
from fastdpo.commands.estimate import batches
from fastdpo.commands.estimate.fitting import largest_fitting
from fastdpo.commands.estimate.prediction import SIDES, estimate
from fastdpo.commands.estimate.simulation import Setup, simulate
from fastdpo.data.columns import COLUMNS
from fastdpo.lengths import pair_lengths
from fastdpo.models import reward_head
from fastdpo.packing import pack
from tests.support.documents.markdown_blocks import blocks
from tests.support.programs.workload import TINY, Workload

BATCH = 2
COLLATOR = DataCollatorForPreference(pad_token_id=batches.PADDING)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(TINY.write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def conversations():
    """Pairs in the format of chats, so that the template of the tokenizer counts."""
    return [
        {
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            "chosen": [{"role": "assistant", "content": pair["chosen"]}],
            "rejected": [{"role": "assistant", "content": pair["rejected"]}],
        }
        for pair in TINY.pairs_of_text()
    ]


@pytest.fixture(scope="module")
def dataset(conversations, tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in conversations))
    return str(path)


def run(*arguments: str) -> None:
    main(["estimate", *arguments])


def test_pairs_are_tokenized_as_in_a_training(model, conversations, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = DPOConfig(output_dir=str(tmp_path), max_length=14, use_cpu=True, bf16=False, report_to="none")
    trainer = DPOTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(conversations), processing_class=tokenizer
    )
    found = batches.prepared(Dataset.from_list(conversations), tokenizer, config)
    assert found.to_dict() == trainer.train_dataset.to_dict()


def test_tokens_are_those_of_the_batches(model, dataset):
    found = estimate(model, dataset, BATCH, max_length=16)
    largest = found.tokens["largest"]
    assert found.pairs <= TINY.pairs  # TRL drops a pair whose completion is truncated
    assert largest["padded"] == 4 * 16  # two pairs of rows that are truncated
    assert largest["shared"] < largest["packed"] < largest["padded"]
    assert all(found.tokens["median"][name] <= tokens for name, tokens in largest.items())


def test_no_deprecated_function_is_called(model, dataset):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*checkpointing_enable", FutureWarning)
        estimate(model, dataset, BATCH)


def chats(turns: int = 3) -> list[dict[str, list[dict[str, str]]]]:
    """Turns of conversations. The messages before a turn are its prompt."""
    rows, said = [], []
    for i, pair in enumerate(Workload(pairs=24).pairs_of_text()):
        said = [*(said if i % turns else []), {"role": "user", "content": pair["prompt"]}]
        answers = {name: [{"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")}
        rows.append({"prompt": said, **answers})
        said = said + answers["chosen"]
    return rows


def test_tokens_of_an_epoch_are_those_of_layouts(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    dataset = batches.prepared(Dataset.from_list(chats()), tokenizer, config)
    of_dataset = batches.Batches(dataset, pair_lengths(dataset), COLLATOR)
    kinship = kinship_of(dataset)
    found = of_dataset.epoch(kinship, 4)

    def computed(order, size, groups=torch.zeros_like):
        parts = [of_dataset.collate(order[i : i + size]) for i in range(0, len(order), size)]
        return sum(len(pack(*x.values(), groups=groups(torch.arange(len(x["labels"])))).token_index) for x in parts)

    drawn = np.random.default_rng(batches.SEED).permutation(len(dataset))
    assert found["packed"] == computed(drawn, 4, torch.clone)
    assert found["shared"] == computed(drawn, 4, lambda rows: rows % (len(rows) // 2))
    expected = {"drawn": (drawn, 4), "grouped": (kinship.grouped(drawn, 4), 4), "tree": (drawn, len(dataset))}
    for name, (order, size) in expected.items():  # the header of the template, less than 1/16 of a row, is left out
        assert computed(order, size) <= found[name] <= computed(order, size) + 2 * len(dataset), name
    assert found["tree"] <= found["grouped"] < 0.8 * found["drawn"] < found["shared"] < found["packed"]


def test_the_largest_batch_fits_and_one_more_pair_does_not(model, dataset):
    unlimited = estimate(model, dataset, 4)
    limit = unlimited.memory["largest"]["patched"].total
    found = estimate(model, dataset, BATCH, limit=limit)
    assert found.fits["patched"] == 4
    assert found.fits["stock"] < 4
    assert estimate(model, dataset, 5).memory["largest"]["patched"].total > limit


@pytest.mark.parametrize("limit", [0, 99, 100, 1000, 12345, 10**9])
@pytest.mark.parametrize("first", [1, 7, 500])
def test_the_search_finds_the_largest_number_in_few_steps(limit, first):
    calls = []

    def memory(n: int) -> int:
        calls.append(n)
        return 90 + 10 * n + 7 * (n // 64)  # nearly linear, with steps

    expected = max([n for n in range(1, 2001) if 90 + 10 * n + 7 * (n // 64) <= limit], default=0)
    assert largest_fitting(memory, limit, first, 2000) == expected
    assert len(calls) == len(set(calls)) <= 14


def test_batches_are_chosen_by_their_tokens():
    rng = np.random.default_rng(0)
    rows = [{name: [1] * int(n) for name, n in zip(COLUMNS, rng.integers(1, 30, 3), strict=True)} for _ in range(31)]
    found = batches.Batches(Dataset.from_list(rows), pair_lengths(rows), COLLATOR)
    for layout in batches.LAYOUTS:
        of_all = [found.tokens(layout, rng.permutation(31)[:4]) for _ in range(200)]
        assert found.tokens(layout, found.largest(layout, 4)) >= max(of_all)
        assert abs(found.tokens(layout, found.median(layout, 4)) / np.median(of_all) - 1) < 0.2


def test_the_command_prints_the_same_as_json(model, dataset, capsys):
    run(model, dataset, "--batch", str(BATCH), "--memory", "1GiB", "--lora", "4", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == dict.fromkeys(SIDES, TINY.pairs)
    for sides in found["memory"].values():
        for side in sides.values():
            assert side["reference_weights"] == 0 < side["weights"] < side["total"]
    run(model, dataset, "--batch", str(BATCH), "--memory", "1GiB", "--precomputed-reference")
    text = capsys.readouterr().out
    assert all(word in text for word in ("padded (TRL)", "peak, largest batch", "any pairs, in 1.00 GiB"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batch must be a positive integer; got 0"),
        (["--batch", "7"], "batch must be at most the 6 pairs of the dataset; got 7"),
        (["--batch", "2", "--memory", "1e9"], "memory must be a number of bytes, or a size such as 80GiB; got '1e9'"),
        (["--batch", "2", "--max-length", "-1"], "max_length must be a positive integer or None; got -1"),
    ],
)
def test_errors_of_the_command(arguments, message, model, dataset):
    with pytest.raises(SystemExit) as error:
        run(model, dataset, *arguments)
    assert error.value.code == f"fastdpo estimate: {message}"


def test_a_model_that_fastdpo_does_not_change_is_named():
    ids = torch.ones(2, 4, dtype=torch.long)
    setup = Setup(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="BloomForCausalLM does not let its attention"):
        simulate(setup, {"input_ids": ids, "attention_mask": ids, "labels": ids}, patched=True)


@pytest.fixture(scope="module")
def rewarder(model, tmp_path_factory):
    """A reward model with the tokenizer of `model`."""
    directory = tmp_path_factory.mktemp("rewarder")
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return str(directory)


def test_the_command_with_a_reward_model(rewarder, dataset, conversations, capsys, tmp_path):
    """Its tokens are those of the batch that RewardTrainer makes of the pairs, padded and packed."""
    n = len(conversations)
    run(rewarder, dataset, "--batch", str(n), "--memory", "1GiB", "--json")
    found = json.loads(capsys.readouterr().out)
    config = RewardConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    trainer = RewardTrainer(model=rewarder, args=config, train_dataset=Dataset.from_list(conversations))
    batch = trainer.data_collator(list(trainer.train_dataset))
    labels = reward_head.labels_of(batch["input_ids"], 0)
    layout = pack(batch["input_ids"], batch["attention_mask"], labels, groups=torch.arange(2 * n) % n, shifted=True)
    tokens = found["tokens"]["largest"]
    assert (tokens["padded"], tokens["shared"]) == (batch["input_ids"].numel(), layout.token_index.numel())
    for sides in found["memory"].values():
        assert all(side["reference_weights"] == side["reference"] == 0 < side["weights"] for side in sides.values())
        assert sides["patched"]["total"] < sides["stock"]["total"]
    assert found["fits"] == dict.fromkeys(SIDES, n)


def test_errors_of_reward_models(model, rewarder, dataset, tmp_path):
    with pytest.raises(SystemExit, match="precomputed_reference must be False for a reward model"):
        run(rewarder, dataset, "--batch", "2", "--precomputed-reference")
    several = AutoConfig.from_pretrained(model, num_labels=3)
    AutoModelForSequenceClassification.from_config(several).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"or a sequence classifier with one label; got .* with 3 labels"):
        run(str(tmp_path), dataset, "--batch", "2")
    ids = torch.ones(2, 4, dtype=torch.long)
    setup = Setup(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2, num_labels=1), rewards=True)
    with pytest.raises(ValueError, match="BloomForSequenceClassification does not let its attention"):
        simulate(setup, {"input_ids": ids, "attention_mask": ids}, patched=True)


def test_weights_of_a_billion_parameters_are_never_allocated(model):
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 8192, 32768
    ids = torch.ones(2, 8, dtype=torch.long)
    memory = simulate(Setup(config), {"input_ids": ids, "attention_mask": ids, "labels": ids}, patched=True)
    assert memory.weights == memory.reference_weights > 4 * 10**9
    assert memory.weights - memory.gradients == 32  # a buffer
    assert memory.optimizer == 2 * memory.gradients
    assert memory.step > memory.gradients


def rows_of(report: str) -> list[list[str]]:
    """The words of each line, without numbers and units."""
    lines = [re.sub(r"\b[\d,.]+\b|\b[KMGT]?i?B\b", "", line).split() for line in report.splitlines()]
    return [words for words in lines if words]


def test_the_report_in_the_documentation(model, dataset, capsys):
    (documented,) = [block.code for block in blocks("text") if block.page == "docs/memory.md" and "stock" in block.code]
    run(model, dataset, "--batch", str(BATCH), "--memory", "80GiB")
    assert rows_of(documented) == rows_of(capsys.readouterr().out)
