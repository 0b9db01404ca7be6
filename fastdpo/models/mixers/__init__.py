"""Runs mixers on packed tokens: layers that mix tokens by other means than attention.

A mixer is a short convolution, a linear attention, a state-space model or a combination of them. It
reads tokens in order, so packed tokens reach its functions as sequences:

    segments.py        where the segments of a layout are, and the sequences they form
    known.py           the functions of modeling files that this package can run on packed tokens: short
                       convolutions and recurrences, in PyTorch code or as the kernel of a package
    function_probe.py  compares a known function on packed tokens with whole rows
    finding.py         which modules of a model are mixers, and whether they are supported
    current.py         the mixer that runs now, and the functions that it has called
    hooks.py           takes a layout from a mixer's arguments, and checks what the mixer called;
                       runs mixers of other functions on whole rows
    modeling_files.py  replaces known functions in the globals of modeling files, and restores them

A layout reaches a mixer where its padding mask would, so that both kinds of gradient checkpointing
bring it back when they run the mixer again.
"""
