"""Everything that fastdpo does to one transformers model: packed attention, fused head, fused
forward.

Nothing in this package knows of a trainer. Each call of a model crosses

    forward.py       replaces the forward of a model, and has the functions that integrations call
    state.py         the options of a fused forward, and what has been found out about its model,
                     and why its calls fall back, which it logs
    deciding.py      whether a call runs packed, padded or falls back, and why
    structure.py     whether the model is as it was when it was examined, with attachments.py (hooks and
                     forwards of others) and contents.py (what modules keep in their attributes)
    facts.py         what a call needs to know of the model
    batch.py         the batch and its layouts, and whether they belong to the tensors of the call
    attention.py     packed attention as an attention implementation of transformers
    head.py          an LM head that returns log-probabilities
    running.py       how the backbone runs: by its layers, compiled.py (compiled layers), or graphs.py (CUDA
                     graphs of either, with recording.py, captures.py, recordable.py and cuts.py), as pace.py
                     finds that it pays
    scoring.py       runs the backbone and the head
    calls.py         counts calls and tokens
    pickling.py      pickles of a model without its fused forward

A model is examined before its first call in training and in evaluation mode, and when it has changed:

    support.py       what its configuration and its modules rule out
    parts.py         the model inside wrappers, its backbone and its language model
    harmless.py      names of hooks, wrappers and attributes that outputs do not depend on
    functions.py     what hooks and replaced forwards are, and where they come from
    examine/         probe.py: a few random rows, packed and padded; runs.py: their hidden states and
                     gradients; comparable.py and snapshot.py: runs that leave the model as it was;
                     verification.py: audits, which compare fused calls with the forward that the model had before
    gradients.py     gradients in a form that is small enough to keep
    sharding.py      models that ranks hold parts of, and so examine together

Some models and batches need more:

    images.py        batches with images, with islands.py (their attention)
    mixers/          layers that mix tokens by other means than attention
    reward_head.py   models that score rows
    adapters.py      PEFT's adapters
    splitting.py     batches that ranks share, with sequence_group.py (what each of them computes)
"""
