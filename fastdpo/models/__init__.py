"""Everything that fastdpo does to one transformers model: packed attention, fused head, fused
forward.

Nothing in this package knows of a trainer. Each call of a model crosses

    forward.py       replaces the forward of a model, and has the functions that integrations call
    state.py         the options of a fused forward, and what has been found out about its model,
                     and why its calls fall back, which it logs
    installing.py    what else is replaced in a model while its calls are fused
    deciding.py      whether a call runs packed, padded or falls back, and why
    identity/        whether the model is as it was when it was examined
    batch.py         the batch and its layouts, and whether they belong to the tensors of the call
    attention.py     packed attention as an attention implementation of transformers
    head.py          an LM head that returns log-probabilities
    running/         how the backbone runs: by its layers, compiled layers or CUDA graphs
    scoring.py       runs the backbone and the head
    calls.py         counts calls and tokens
    parts.py         the model inside wrappers, its backbone and its language model
    pickling.py      pickles of a model without its fused forward

A model is examined before its first call in training and in evaluation mode, and when it has changed:

    examine/         by its configuration and modules, by a few random rows, packed and padded, and by audits, which
                     compare fused calls with the forward that the model had before

Some models and batches need more:

    images.py        batches with images
    mixers/          layers that mix tokens by other means than attention
    reward_head.py   models that score rows
    adapters.py      PEFT's adapters
    ranks/           models and batches that ranks have in common
"""
