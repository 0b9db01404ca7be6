"""A fingerprint of a function is that of what it does, not of how it is written."""

import inspect

import pytest

from fastdpo.integrations.admission import fingerprints

FUNCTION = '''
def mean(rows, width=None):
    """A docstring."""
    import numpy as np
    from math import fsum as add

    def scaled(row, by=1.0):
        return row * by

    rest: float = 0.0
    total = 0
    for i in range(len(rows)):
        total += scaled(rows[i], by=0.5)  # a comment
    try:
        signs = [x.sign for x in rows if x]
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error
    with open("log") as log:
        log.write(f"{total:.2f}")
    order = sorted(signs, key=lambda sign, twice=2: -sign * twice)
    first, *others = order
    if (size := np.sum(others)) > first:
        rest = add([size, first])
    return total if width is None else (total + rest) / width
'''

SAME = {  # what is done to the text: its parts, and what replaces them
    "a local variable": [("total", "summed")],
    "the variable of a loop": [(" i ", " index "), ("[i]", "[index]")],
    "the variable of a comprehension": [("x.sign for x in rows if x", "row_.sign for row_ in rows if row_")],
    "the name of a nested function": [("scaled", "shrunk")],
    "the arguments of a lambda": [("lambda sign, twice=2: -sign * twice", "lambda a, b=2: -a * b")],
    "the name of an exception": [("as error", "as e"), ("str(error)) from error", "str(e)) from e")],
    "the name of a module": [("import numpy as np", "import numpy"), ("np.sum", "numpy.sum")],
    "the name of what is imported": [("fsum as add", "fsum"), ("add(", "fsum(")],
    "the name of a context": [("as log", "as file"), ("log.write", "file.write")],
    "a name that is assigned in an expression": [("size", "n")],
    "names that are unpacked": [("first", "head"), ("others", "tail")],
    "two names that are swapped": [("total", "?"), ("rest", "total"), ("?", "rest")],
    "the docstring": [("A docstring.", "Another\n    one.")],
    "no docstring": [('    """A docstring."""\n', "")],
    "a comment": [("  # a comment", "\n        # another")],
    "an annotation of an argument": [("rows, width", "rows: list, width: int | None")],
    "an annotation of the result": [("width=None):", "width=None) -> float:")],
    "an annotation of a variable": [("rest: float = 0.0", "rest = 0.0")],
    "parentheses": [("return row * by", "return (\n            row\n            * by\n        )")],
    "quotation marks": [('open("log")', "open('log')")],
    "indentation": [("    ", "\t")],
    "a trailing comma": [("sorted(signs, ", "sorted(\n        signs,\n        ")],
}

DIFFERENT = {
    "an argument": [("width", "size_")],
    "an argument of a nested function": [("row, by", "line, by"), ("return row", "return line")],
    "the order of arguments": [("rows, width=None", "width=None, rows=None")],
    "a default value": [("width=None)", "width=1)")],
    "a default value of a lambda": [("twice=2", "twice=3")],
    "a constant": [("range(len(rows))", "range(1, len(rows))")],
    "a number of another type": [("total = 0\n", "total = 0.0\n")],
    "True for 1": [("total = 0", "total = False")],
    "a text": [('"log"', '"logs"')],
    "the format of a text": [(":.2f", ":.3f")],
    "an operator": [("+=", "-=")],
    "a comparison": [("> first", ">= first")],
    "the order of operands": [("total + rest", "rest + total")],
    "a function that is called": [("sorted(", "list(")],
    "a global for a local": [("range(len(rows))", "range(len(total))")],
    "an attribute": [("x.sign", "x.size")],
    "a keyword": [("key=", "cmp=")],
    "an exception": [("TypeError, ValueError", "TypeError")],
    "what is imported": [("math import fsum as add", "math import prod as add")],
    "where it is imported from": [("import numpy as np", "import torch as np")],
    "the condition of a comprehension": [("rows if x]", "rows]")],
    "a statement": [("    total = 0\n", "    total = 0\n    rows = rows[:1]\n")],
    "the order of statements": [
        ("    rest: float = 0.0\n    total = 0\n", "    total = 0\n    rest: float = 0.0\n"),
    ],
    "the depth of a statement": [("    return total if", "        return total if")],
    "a decorator": [("def mean", "@cache\ndef mean")],
    "two locals in one place": [("total += scaled(rows[i]", "i += scaled(rows[total]")],
    "an asynchronous function": [("def mean", "async def mean")],
}


def changed(changes):
    text = FUNCTION
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_change_a_function_does_not_change_its_fingerprint(change):
    other = changed(SAME[change])
    assert other != FUNCTION
    assert fingerprints.hash_of(other) == fingerprints.hash_of(FUNCTION)


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_changes_a_function_changes_its_fingerprint(change):
    assert fingerprints.hash_of(changed(DIFFERENT[change])) != fingerprints.hash_of(FUNCTION)


HIDDEN = """
def weighted(rows):
    losses = [{0} for {0} in rows]
    return {0}(losses)
"""
NESTED = """
def weighted(rows):
    def step():
        {0} = 1
        return {0}
    return step() + {0}(rows)
"""
DECLARED = """
def weighted(rows):
    global {0}
    {0} = sum(rows)
"""


@pytest.mark.parametrize("text", [HIDDEN, NESTED, DECLARED])
def test_a_global_is_not_a_local_of_the_same_name(text):
    """Its name counts, also where a local has it."""
    assert fingerprints.hash_of(text.format("mean")) != fingerprints.hash_of(text.format("sum_"))


def test_a_name_of_an_enclosing_function_counts():
    text = "def f():\n    {0} = 0\n    def g():\n        nonlocal {0}\n        {0} += 1\n    return g\n"
    assert fingerprints.hash_of(text.format("n")) != fingerprints.hash_of(text.format("n").replace("+= 1", "+= 2"))


def test_a_method_is_that_of_its_class_with_other_names():
    class Trainer:
        def loss(self, rows):
            total = sum(rows)
            return super().loss(total)

    class Renamed:
        def loss(self, rows):
            result = sum(rows)  # as above
            return super().loss(result)

    sources = [inspect.getsource(kind.loss) for kind in (Trainer, Renamed)]
    assert sources[0] != sources[1]
    assert fingerprints.hash_of(sources[0]) == fingerprints.hash_of(sources[1])


def test_the_reach_of_a_function_ends_where_it_is_told_to():
    whole = fingerprints.reached(fingerprints.code_hash.__wrapped__)
    names = {name.rpartition(".")[2] for name in whole}
    assert {"code_hash", "hash_of", "normalized", "source_of"} <= names
    ends = {
        "fastdpo.integrations.admission.fingerprints.hash_of",
        "fastdpo.integrations.admission.fingerprints.code_hash",
    }
    ended = fingerprints.reached(fingerprints.code_hash.__wrapped__, ends)
    assert {name.rpartition(".")[2] for name in ended} == {"code_hash", "source_of"}
