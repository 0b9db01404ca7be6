"""Parses the entry function of a PTX module."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .formats import TYPES


class Register(NamedTuple):
    number: int
    kind: str  # its declared type, "b32" or "pred"


class Immediate(NamedTuple):
    bits: int


class Symbol(NamedTuple):
    """A special register, a parameter, an address in shared memory or a label."""

    name: str


class Vector(NamedTuple):
    elements: tuple[Operand, ...]


class Address(NamedTuple):
    base: Operand
    offset: int


class Alternatives(NamedTuple):
    """Two destinations, `d|p`."""

    first: Operand
    second: Operand


class Negated(NamedTuple):
    predicate: Register


Operand = Register | Immediate | Symbol | Vector | Address | Alternatives | Negated


@dataclass
class Instruction:
    """`@guard opcode.modifiers.types operands`.

    Attributes:
        types: the parts of the name that are types, in order.
        modifiers: its other parts; state spaces are among them.
        source: the line of the kernel's Python file that it was compiled from.
        target: the index of the instruction that a branch leads to.
    """

    text: str
    source: str
    guard: Register | Negated | None
    opcode: str
    types: tuple[str, ...]
    modifiers: tuple[str, ...]
    operands: list[Operand]
    target: int = -1

    @property
    def type(self) -> str:
        """The last type, that of the operands."""
        return self.types[-1]


@dataclass
class Scope:
    """A block in braces, with names of its own."""

    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    branches: list[Instruction] = field(default_factory=list)  # to labels not yet found


TOKEN = re.compile(r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+)\s*:(?!:)|(?P<statement>[^;]*);)")
ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)(?=\{)", re.DOTALL)
NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)")


class Program:
    """An entry function.

    Attributes:
        name: its name.
        threads: the number of threads of a program.
        parameters: the size of each parameter in bytes, by its name, in order.
        code: its instructions.
        registers: the number of its registers.
    """

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"\.loc\s[^\n]*//\s*(\S+?:\d+)\S*[^\n]*", r".loc \1;", ptx)
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/|\.loc\s[^;\n]*\n", "\n", ptx, flags=re.DOTALL)
        found = ENTRY.search(ptx)
        if found is None:
            raise ValueError("the module has no entry function")
        self.name, parameters, directives = found.groups()
        sizes = re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", directives)
        if sizes is None:
            raise ValueError(f"{self.name}: the number of threads must be given")
        self.threads = math.prod(int(x) for x in sizes[1].split(","))
        self.parameters = dict(_parameter(x) for x in parameters.split(",") if x.strip())
        self.code: list[Instruction] = []
        self.registers = 0
        self._scopes: list[Scope] = []
        self._source = ""
        self._parse_body(ptx, found.end())

    def _parse_body(self, ptx: str, at: int) -> None:
        while True:
            token = TOKEN.match(ptx, at)
            if token is None:
                raise ValueError(f"{self.name}: cannot parse {ptx[at : at + 80]!r}")
            at = token.end()
            match token.lastgroup:
                case "open":
                    self._scopes.append(Scope())
                case "close":
                    self._close_scope()
                    if not self._scopes:
                        return
                case "label":
                    self._scopes[-1].labels[token["label"]] = len(self.code)
                case _:
                    self._parse_statement(" ".join(token["statement"].split()))

    def _close_scope(self) -> None:
        scope = self._scopes.pop()
        for branch in scope.branches:
            (label,) = branch.operands
            if label.name in scope.labels:
                branch.target = scope.labels[label.name]
            elif self._scopes:
                self._scopes[-1].branches.append(branch)
            else:
                raise ValueError(f"{self.name}: no label for {branch.text}")

    def _parse_statement(self, text: str) -> None:
        if text.startswith(".loc "):
            self._source = text.removeprefix(".loc ")
        elif text.startswith(".reg "):
            kind, names = re.fullmatch(r"\.reg \.(\w+) (.*)", text).groups()
            for name in names.split(","):
                self._declare(name.strip(), kind)
        elif text.startswith("."):
            if not text.startswith(".pragma"):
                raise NotImplementedError(text)
        else:
            self._parse_instruction(text)

    def _declare(self, name: str, kind: str) -> None:
        several = re.fullmatch(r"(.*)<(\d+)>", name)
        for x in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]:
            self._scopes[-1].registers[x] = Register(self.registers, kind)
            self.registers += 1

    def _parse_instruction(self, text: str) -> None:
        guard, name, operands = re.fullmatch(r"(?:@(\S+) )?(\S+) ?(.*)", text).groups()
        opcode, *parts = name.replace("::", "_").split(".")
        instruction = Instruction(
            text,
            self._source,
            None if guard is None else self._operand(guard),
            opcode,
            tuple(x for x in parts if x in TYPES),
            tuple(x for x in parts if x not in TYPES),
            [self._operand(x) for x in _split(operands)],
        )
        self.code.append(instruction)
        if opcode == "bra":
            self._scopes[-1].branches.append(instruction)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(x) for x in _split(text[1:-1])))
        if text.startswith("["):
            base, offset = re.fullmatch(r"(.*?)\s*(?:\+\s*(-?\w+))?", text[1:-1].strip()).groups()
            return Address(self._operand(base), int(offset or "0", 0))
        if "|" in text:
            return Alternatives(*(self._operand(x.strip()) for x in text.split("|")))
        if text.startswith("!"):
            return Negated(self._operand(text[1:]))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16))
        if NUMBER.fullmatch(text):
            return Immediate(int(text, 0))
        for scope in reversed(self._scopes):
            if text in scope.registers:
                return scope.registers[text]
        return Symbol(text)


def _parameter(text: str) -> tuple[str, int]:
    """The name of a parameter and its size in bytes."""
    kind, name, length = re.fullmatch(r"\.param\s.*?\.[usbf](\d+)\s.*?([\w$]+)(?:\[(\d+)\])?", text.strip()).groups()
    return name, int(kind) // 8 * int(length or 1)


def _split(text: str) -> list[str]:
    """Parts between commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [x.strip() for x in parts if x.strip()]
