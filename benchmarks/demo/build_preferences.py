"""Writes preferences.jsonl: preference pairs from the docstrings of Python's standard library.

    python -m benchmarks.demo.build_preferences

A prompt asks what a function, class or method does. The chosen completion is the documentation of
that object; the rejected completion is the documentation of another object of the same module.
Equal Python versions write equal files.
"""

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PREFERENCES = Path(__file__).with_name("preferences.jsonl")
COMPLETION_CHARS = (70, 640)
CONTEXT_CHARS = (120, 1100)
PROMPT_CHARS = 190
PAIRS_PER_MODULE = 4
NEIGHBOURS = 8
MODULE_NAMES = """
abc argparse array ast asyncio base64 bisect bz2 calendar cmath cmd code codecs collections colorsys
concurrent.futures configparser contextlib copy csv ctypes.util dataclasses datetime decimal difflib dis doctest
email.message email.utils enum filecmp fileinput fnmatch fractions ftplib functools gc getpass gettext glob graphlib
gzip hashlib heapq hmac html html.parser http.client http.cookiejar http.cookies imaplib inspect io ipaddress
itertools json keyword linecache locale logging logging.handlers lzma mailbox math mimetypes mmap multiprocessing.pool
netrc numbers operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib pprint
profile py_compile queue random re reprlib sched secrets select selectors shelve shlex shutil signal smtplib socket
socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys tabnanny tarfile tempfile textwrap
threading time timeit tokenize trace traceback tracemalloc turtle types typing unicodedata unittest unittest.mock
urllib.error urllib.parse urllib.request urllib.robotparser uuid warnings wave weakref wsgiref.handlers
wsgiref.headers xml.dom.minidom xml.etree.ElementTree xml.sax.handler xml.sax.saxutils xmlrpc.client zipfile zipimport
zlib zoneinfo
"""


class DocumentedObject(NamedTuple):
    """An object of a module: its name, its call, the documentation of its class, and its own."""

    name: str
    call: str
    class_documentation: str
    documentation: str


def fraction(*words: str) -> float:
    """A number in [0, 1) that depends only on the words."""
    return int(hashlib.sha256(" ".join(words).encode()).hexdigest()[:12], 16) / 16**12


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is running text and no code, list, table, heading or signature."""
    lines = paragraph.splitlines()
    if any(line.startswith((" ", "\t", ">>>", "- ", "* ", "+-", "|", "..", "@", ":")) for line in lines):
        return False
    if re.search(r"^\s*([-=~*#]{3,}|\w+ +--? |\d+[.)] )|\S {3,}\S|://|::|->|\$|[<>]{2}|={2}", paragraph, re.MULTILINE):
        return False
    if re.match(r"[\w.]+\(.*\)\s*($|\n)|[\w ]+:\s*$", paragraph):
        return False
    if re.search(r"XXX|\.\.(?!\.)|^[^A-Z]|[^.!]$", paragraph.strip()):
        return False
    return len(re.findall(r"\b[a-z]{2,}\b", paragraph)) >= 5


def plain(paragraph: str) -> str:
    """The paragraph as one line, without reStructuredText markup."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(paragraph.split()))
    text = re.sub(r"`+([^`]+)`+", r"\1", re.sub(r"`([\w.]+)'", r"\1", text))
    return re.sub(r"(?<!\w)\*{1,2}([\w.()]+)\*{1,2}(?!\w)", r"\1", text)


def prose(doc: str | None, limit: int) -> str:
    """The leading whole paragraphs of running text in a docstring, up to `limit` characters."""
    kept: list[str] = []
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(doc or ""))
    if re.match(r"[\w.]+\(|[\w ]+$", paragraphs[0]) and ">" not in paragraphs[0]:
        paragraphs = paragraphs[1:]
    for paragraph in paragraphs:
        text = plain(paragraph)
        if not is_prose(paragraph) or sum(map(len, kept)) + len(text) > limit:
            break
        kept.append(text)
    return "\n".join(kept)


def call_of(name: str, documented: Any) -> str:
    """The object with its parameters; only its name if it has no signature.

    Annotations, `self` and `cls` are left out.
    """
    try:
        signature = inspect.signature(documented)
    except (TypeError, ValueError):
        return name
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return name + re.sub(r", /|/, |(?<=\()/", "", re.sub(r"<([^<>]|<[^>]*>)*>", "...", shown))


def documented_objects(module: ModuleType) -> Iterator[DocumentedObject]:
    """Public functions, classes and methods that have documentation."""

    def entry(name: str, value: Any, class_documentation: str) -> Iterator[DocumentedObject]:
        documentation = prose(getattr(value, "__doc__", None), COMPLETION_CHARS[1])
        if len(documentation) >= COMPLETION_CHARS[0]:
            yield DocumentedObject(name, call_of(name, value), class_documentation, documentation)

    public = sorted(name for name in getattr(module, "__all__", vars(module)) if not name.startswith("_"))
    for name in public:
        value = getattr(module, name, None)
        own = getattr(value, "__module__", None) in (module.__name__, f"_{module.__name__}")
        if inspect.isclass(value) and own:
            yield from entry(name, value, "")
            for method, function in sorted(vars(value).items()):
                if not method.startswith("_") and inspect.isroutine(function):
                    yield from entry(f"{name}.{method}", function, prose(value.__doc__, CONTEXT_CHARS[1]))
        elif inspect.isroutine(value) and own:
            yield from entry(name, value, "")


def question(name: str) -> str:
    """One of several wordings of the question what an object does."""
    wordings = ("What does {} do?", "What is {} for?", "Explain {} in a few words.", "How is {} documented?")
    return wordings[int(fraction("wording", name) * len(wordings))].format(name)


def prompt_of(module: str, about: str, item: DocumentedObject, neighbours: list[str]) -> str:
    """The prompt: module, class and neighbours of the object, its call, and the question."""
    low, high = CONTEXT_CHARS
    budget = low + int((high - low) * fraction("budget", module, item.name) ** 2)
    parts = [f"The module {module} belongs to the standard library of Python.", prose(about, budget)]
    if item.class_documentation and len(item.class_documentation) <= budget:
        parts += [f"About the class {item.name.split('.')[0]}: {item.class_documentation}"]
    if neighbours:
        parts += [f"Next to {item.name} the module has {', '.join(neighbours)}."]
    parts += [f"It is used as\n\n    {module}.{item.call}", question(f"{module}.{item.name}")]
    return "\n\n".join(part for part in parts if part) + "\n"


def pairs_of(name: str, seen: set[str]) -> Iterator[dict[str, str]]:
    """Pairs of one module. No completion repeats one of another module."""
    module = importlib.import_module(name)
    shuffled = sorted(documented_objects(module), key=lambda item: fraction(name, item.name))
    distinct = {item.documentation[:60]: item for item in shuffled if item.documentation[:60] not in seen}
    picked = list(distinct.values())[:PAIRS_PER_MODULE]
    if len(picked) < 3:
        return
    seen.update(item.documentation[:60] for item in picked)
    for item, sibling in zip(picked, picked[1:] + picked[:1], strict=True):
        count = int(NEIGHBOURS * fraction("neighbours", name, item.name))
        neighbours = sorted(other.name for other in shuffled if other.name != item.name)[:count]
        prompt = prompt_of(name, module.__doc__ or "", item, neighbours)
        if len(prompt) >= PROMPT_CHARS:
            yield {"prompt": prompt, "chosen": item.documentation, "rejected": sibling.documentation}


def main() -> None:
    seen: set[str] = set()
    pairs = [pair for name in MODULE_NAMES.split() for pair in pairs_of(name, seen)]
    pairs.sort(key=lambda pair: fraction(pair["prompt"]))
    PREFERENCES.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{len(pairs)} pairs, {PREFERENCES.stat().st_size} bytes: {PREFERENCES}")


if __name__ == "__main__":
    main()
