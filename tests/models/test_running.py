"""How `compile="auto"` changes a training: at which call, on what evidence, and back. The CPU stands in for a GPU."""

import gc

import pytest
import torch
from torch.testing import assert_close

import fastdpo
from fastdpo.models.running import compiled, pace
from fastdpo.models.running import runner as running
from fastdpo.models.running.pace import Pace
from fastdpo.models.state import state_of
from fastdpo.ops.choice import notes
from tests.models.test_graphs import BATCHES, batch, gradients, llama, loss_of, replays, step, trained
from tests.support.faults import out_of_memory, raising
from tests.support.kernels import recorder as recording


@pytest.fixture(autouse=True)
def recorder(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "fastdpo")
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    monkeypatch.setattr(pace, "trainings", [pace.Training()])
    return recording.install(monkeypatch)


@pytest.fixture
def speed(monkeypatch):
    """Plants the seconds of forward passes: of the layers as they are, and what compiled ones leave of it. Nothing is
    recorded: torch compiles nothing while the stand-in records.
    """
    found = {"compiled": 0.5, "passes": []}

    def seconds(run, device):
        run()
        is_compiled = not any(x.runner.compiled and x.runner.compiled.is_paused for x in found["models"])
        found["passes"].append(is_compiled)
        return found["compiled"] if is_compiled else 1.0

    monkeypatch.setattr(running.pace, "seconds", seconds)
    monkeypatch.setattr(Pace, "is_recorded", lambda *_: False)
    monkeypatch.setattr(running.graphs, "is_device_busy", lambda *_: False)
    monkeypatch.setattr(Pace, "gain_of_compiling", lambda self, parameters, noted: float(self.calls > 5))
    monkeypatch.setattr(Pace, "between", 2.0)
    return found


def prepared(speed, **options):
    model = fastdpo.prepare(llama(), **options)
    speed["models"] = [state_of(model)]
    return model


def is_compiled(model):
    return [x._compiled_call_impl is not None for x in model.model.layers]


def train(model, steps, accumulation=2):
    """By call, whether layers were compiled in it, and the gradients of all steps."""
    optimizer, found, states = torch.optim.SGD(model.parameters(), lr=0.01), [], []
    for i in range(steps):
        for j in range(accumulation):
            loss_of(model, BATCHES[(i + j) % len(BATCHES)]).backward()
            (state,) = {*is_compiled(model)}
            states.append(state)
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return states, found


def test_layers_are_compiled_between_two_steps(speed, caplog):
    model, other = prepared(speed), fastdpo.prepare(llama(), compile=False)
    states, found = train(model, 8)
    # Tried in the call that begins the fourth step, and compiled from the next step on.
    assert states == 8 * [False] + 8 * [True]
    assert speed["passes"][-8 * 4 :].count(True) > 0
    for ours, expected in zip(found, train(other, 8)[1], strict=True):
        assert_close(ours, expected)
    (line,) = [x for x in caplog.messages if "from step" in x]
    assert line == (
        "fastdpo: fastdpo.score (policy): layers are compiled from step 5 on, which saves 50% of a step; "
        "compile=False decides otherwise, and FASTDPO_AUTO=0 nothing"
    )
    assert pace.training().settled == {"fastdpo.score (policy)": True}
    (noted,) = notes.read(model.device).layers.values()
    assert noted.saving == pytest.approx(0.5)


def test_what_whole_steps_have_saved_is_noted(speed, monkeypatch):
    """Instead of what a trial of forward passes has found."""
    model = prepared(speed)
    noted = []
    monkeypatch.setattr(pace, "WATCHED", 2)
    monkeypatch.setattr(pace, "saving_of", lambda *_: 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        step(model, BATCHES[0])
        optimizer.step()
        noted += notes.read(model.device).layers.values()
    assert [noted[0].saving, noted[-1].saving] == pytest.approx([0.5, 0.1])
    assert noted[0].seconds == noted[-1].seconds


def test_compiled_layers_that_are_not_faster_are_taken_back(speed, caplog):
    speed["compiled"] = 0.99
    model = prepared(speed)
    states, _ = train(model, 8)
    assert states == 16 * [False]
    assert "layers are not compiled from step 5 on, which would not pay; compile=True decides otherwise" in (
        caplog.text
    )
    assert pace.training().settled == {"fastdpo.score (policy)": False}


def test_layers_that_cannot_be_compiled(speed, caplog):
    model = prepared(speed)
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward  # an attribute of its own
    train(model, 8)
    assert pace.training().settled == {"fastdpo.score (policy)": False}
    assert [x for x in caplog.messages if "layers not compiled, " in x and "[compiled-hooks]" in x]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((running.pace, "seconds"), "torch cannot compile LlamaModel as one graph: OutOfMemoryError: planted"),
        ((compiled, "BACKEND"), "layers are not compiled from step 5 on, which would not pay"),
    ],
    ids=["run", "compilation"],
)
def test_an_error_in_a_trial(place, message, speed, monkeypatch, caplog):
    """It neither ends the training, nor is it noted for later ones."""
    monkeypatch.setattr(*place, raising(torch.OutOfMemoryError("planted")))
    model = prepared(speed)
    states, _ = train(model, 8)
    assert states == 16 * [False]
    assert message in caplog.text
    assert pace.training().settled == {"fastdpo.score (policy)": False}
    assert not notes.read(model.device).layers


def test_calls_without_gradients_that_come_first_in_a_step(speed):
    """They are not what decides: a backward saves more than they."""
    model = prepared(speed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for given in BATCHES * 2:
        with torch.no_grad():
            loss_of(model, given)
        step(model, given)
        optimizer.step()
    assert all(is_compiled(model))
    (noted,) = notes.read(model.device).layers.values()
    assert noted.saving == pytest.approx(0.5)


def test_a_batch_that_is_not_packed_in_the_step_of_a_trial(speed):
    """The next packed batch is tried."""
    model = prepared(speed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(8):
        given = BATCHES[i % len(BATCHES)]
        if i == 5:
            given = given[0], torch.ones_like(given[1]).index_fill_(1, torch.tensor([1]), 0), given[2]
        step(model, given)
        optimizer.step()
    assert pace.training().settled == {"fastdpo.score (policy)": True}
    fastdpo.prepare(model, compile=False)
    assert not any(is_compiled(model))


def test_ranks_with_other_notes_decide_together(speed, monkeypatch):
    """One that has noted what compiled layers save waits for one that has to try."""
    votes = [], []
    model = prepared(speed)
    key = f"LlamaForCausalLM of {sum(x.numel() for x in model.parameters())} parameters in {model.dtype}"
    notes.note(model.device, layers={key: notes.Compiled(1.0, 0.3)})
    for ballot, seen in zip(state_of(model).runner._ballots, votes, strict=True):
        monkeypatch.setattr(ballot, "smallest", lambda step, number, seen=seen: (seen.append(number), number)[1])
    monkeypatch.setattr(state_of(model).runner._ballots[1], "smallest", lambda step, number: votes[1].append(number))
    states, _ = train(model, 8)
    assert states == 16 * [False]
    assert {*votes[1]} == {0.3}


def test_a_second_training_decides_anew(speed, monkeypatch, recorder):
    """It begins as the first one, and the layers can be restored after it."""
    monkeypatch.setenv(notes.VARIABLE, "0")
    seen = []
    monkeypatch.setattr(Pace, "is_recorded", lambda self, tokens, number: seen.append(number))
    model = prepared(speed)
    found = []
    for _ in range(2):
        monkeypatch.setattr(pace, "trainings", [pace.Training()])
        seen.clear()
        found.append(train(model, 8)[0])
        assert max(seen) == 16
    assert found == [8 * [False] + 8 * [True]] * 2
    fastdpo.prepare(model, compile=False)
    assert not any(is_compiled(model))


@pytest.mark.parametrize("decided", [True, False])
def test_a_training_that_is_resumed_begins_settled(speed, decided):
    model = prepared(speed)
    pace.begin({"fastdpo.score (policy)": decided})
    training = pace.training()
    for training.done in range(1, 3):
        step(model, BATCHES[0])
        assert {*is_compiled(model)} == {decided}
    assert not speed["passes"]


def test_what_an_earlier_process_has_noted_is_not_tried(speed):
    model = prepared(speed)
    key = f"LlamaForCausalLM of {sum(x.numel() for x in model.parameters())} parameters in {model.dtype}"
    notes.note(model.device, layers={key: notes.Compiled(1.0, 0.3)})
    states, _ = train(model, 8)
    assert states == 6 * [False] + 10 * [True]


@pytest.mark.parametrize("compile", ["auto", True, False])
def test_what_fixes_a_run(speed, monkeypatch, compile):
    """With `FASTDPO_AUTO=0`, nothing that the user has not asked for happens."""
    monkeypatch.setenv("FASTDPO_AUTO", "0")
    model = prepared(speed, compile=compile)
    states, _ = train(model, 8)
    assert {*states} == {compile is True}
    assert not speed["passes"]


@pytest.mark.parametrize("call", range(1, 6))
def test_a_batch_without_memory_runs_again_without_recordings(monkeypatch, recorder, caplog, call):
    models = [fastdpo.prepare(llama()) for _ in range(2)]
    fastdpo.prepare(models[1], compile=False)
    expected = [step(models[1], given) for given in BATCHES * 2]
    out_of_memory(monkeypatch, call)
    found = [step(models[0], given) for given in BATCHES * 2]
    for ours, stock in zip(found, expected, strict=True):
        assert_close(ours, stock)
    assert "memory ran out for a batch, so that recordings were dropped [graphs-memory-left]" in caplog.text
    gc.collect()
    assert not recorder.recordings


def test_a_reference_without_memory_takes_back_what_the_policy_has_recorded(monkeypatch, recorder, caplog):
    """Between forward and backward of the policy, whose gradients stay what they are."""
    policy, reference = trained(), fastdpo.prepare(llama())
    expected = step(trained(BATCHES[:-1]), BATCHES[-1])
    policy.zero_grad()
    loss = loss_of(policy, BATCHES[-1])
    out_of_memory(monkeypatch, 0)
    with torch.no_grad():
        loss_of(reference, BATCHES[-1])
    loss.backward()
    assert_close(gradients(policy), {name: x for name, x in expected.items() if name != "loss"})
    del loss
    gc.collect()
    assert not recorder.recordings
    assert "no CUDA graphs, memory ran out for a batch" in caplog.text


def test_a_trial_of_a_recording_runs_one_batch(monkeypatch, recorder):
    """The layers run its tokens alone. The replay has taken the same ones, and runs its padding."""
    taken, timed = [], []

    def noted(run):
        return lambda self, inputs: taken.append(inputs["input_ids"]) or run(self, inputs)

    def seconds(run, device):
        taken.clear()
        run()
        timed.append(taken[0])
        return 1.0

    monkeypatch.setattr(running.graphs.Recording, "fill", noted(running.graphs.Recording.fill))
    monkeypatch.setattr(running.graphs, "run_layers", noted(running.graphs.run_layers))
    monkeypatch.setattr(running.pace, "seconds", seconds)
    trained(BATCHES[:3])
    assert len(timed) == 4 * recorder.made // 2
    assert all(torch.equal(*pair) for pair in zip(timed[::2], timed[1::2], strict=True))
    assert all(x.shape[1] % 16 for x in timed)


def test_compiled_layers_are_tried_by_replays_where_calls_replay(speed, monkeypatch, recorder):
    model, replayed = prepared(speed), []
    monkeypatch.setattr(Pace, "is_recorded", lambda *_: True)
    seconds = running.pace.seconds

    def counted(run, device):
        before = recorder.replays
        taken = seconds(run, device)
        replayed.append(recorder.replays - before)
        return taken

    monkeypatch.setattr(running.graphs, "trial_of", lambda *_: pace.Trial(40, 1.0, 0.1))
    monkeypatch.setattr(running.pace, "seconds", counted)
    train(model, 6)
    assert replayed == [0] + 2 * running.PAIRS * [1]


def test_recordings_leave_room(monkeypatch, recorder, caplog):
    """Without it, those that exist are replayed, and no other one is made."""
    long = batch((40, 20, 20))
    model = trained([*BATCHES[:2], long])
    monkeypatch.setattr(running.graphs, "has_room", lambda device: False)
    before = replays()
    for given in (long, long, *BATCHES[:2]):
        step(model, given)
    assert (replays() - before, recorder.made) == (2, 2)
    (line,) = [x for x in caplog.messages if "no CUDA graphs" in x]
    assert "the device has no memory for a recording of 80 tokens [graphs-memory]" in line


def test_a_training_begins_without_the_recordings_of_what_was_before(recorder):
    """As of an evaluation, or of references that were precomputed: its optimizer has not taken its memory yet."""
    model = fastdpo.prepare(llama())
    with torch.no_grad():
        for given in BATCHES:
            loss_of(model, given)
    assert len(recorder.recordings) == 1
    pace.begin({})
    step(model, BATCHES[0])
    assert not recorder.recordings


def test_an_allocator_that_does_not_say_what_is_free(monkeypatch, recorder, caplog):
    """As those that replace torch's own: what a recording may take cannot be known, and nothing is raised."""

    error = RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")
    monkeypatch.setattr(running.graphs, "has_room", raising(error))
    trained()
    assert recorder.made == 0
    (line,) = [x for x in caplog.messages if "no CUDA graphs" in x]
    assert "Calling snapshot with backend:cudaMallocAsync is not meaningful" in line


def test_an_error_without_recordings_is_raised(monkeypatch):
    gc.collect()  # models of other tests, with what they have recorded
    model = fastdpo.prepare(llama())
    out_of_memory(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        step(model, BATCHES[0])


def test_recordings_that_are_made_more_often_than_replayed(monkeypatch, caplog):
    monkeypatch.setattr(running.graphs, "MAX_RECORDINGS", 3)
    model = fastdpo.prepare(llama())
    for i in range(16):
        step(model, BATCHES[i % 5])
        for p in model.parameters():
            p.data = p.data.clone()
    assert "recordings were made anew 3 times, for 3 replays [graphs-replaced]" in caplog.text
