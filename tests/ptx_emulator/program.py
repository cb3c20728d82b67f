"""PTX text as statements: labels, guards, opcodes, operands, and the types of registers. Nothing is interpreted here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptx_emulator.errors import PTXError

_GUARD = re.compile(r"@(!?)([%\w$]+)\s+(.*)", re.DOTALL)
_LABEL = re.compile(r"([$\w]+):(?!:)\s*(.*)", re.DOTALL)
_PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
_REGISTERS = re.compile(r"([%\w$]+)(<\d+>)?")


@dataclass(frozen=True)
class Statement:
    """One instruction. ``guard``: a predicate and whether it is negated. ``place``: file and line of the kernel's source."""

    opcode: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.text}  ({self.place})" if self.place else self.text


@dataclass
class Program:
    """One kernel (``.entry``). ``labels``: the statement that follows; ``registers``: types of declared names and families.

    ``threads``: of a block, where the text says it (``.reqntid``); else 32.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, ptx: str) -> Program:
        files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(ptx)}
        ptx = re.sub(r"//[^\n]*", "", ptx)
        entry = _ENTRY.search(ptx)
        if entry is None:
            raise PTXError("the text has no .entry")
        name, parameters, directives = entry.groups()
        threads = re.search(r"\.reqntid\s+(\d+)", directives)
        program = cls(
            name, tuple(re.findall(r"([\w$]+)\s*(?:,|$)", parameters.strip())), int(threads[1]) if threads else 32
        )
        program._read_body(ptx[entry.end() :], files)
        return program

    def _read_body(self, body: str, files: dict[str, str]) -> None:
        place, rest, scopes = "", "", 1
        for line in body.splitlines():
            line = line.strip()
            if located := _PLACE.match(line):
                place = f"{files.get(located[1], '?')}:{located[2]}"
                continue
            rest = f"{rest} {line}".strip()
            while rest:
                # A brace here opens or closes a scope: those of operands stand behind an opcode.
                if rest[0] in "{}":
                    scopes += 1 if rest[0] == "{" else -1
                    rest = rest[1:].lstrip()
                    if scopes == 0:
                        return
                elif label := _LABEL.match(rest):
                    self.labels[label[1]] = len(self.statements)
                    rest = label[2]
                elif ";" in rest:
                    text, rest = (part.strip() for part in rest.split(";", 1))
                    self._add(text, place)
                else:
                    break

    def _add(self, text: str, place: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name, family in _REGISTERS.findall(names):
                self.registers[name if family else f"{name} alone"] = kind[1:]
        elif text and not text.startswith(".pragma"):
            guard = _GUARD.match(text)
            instruction = (guard[3] if guard else text).split(None, 1)
            opcode, operands = instruction[0], tuple(_split(instruction[1])) if len(instruction) > 1 else ()
            negated = (guard[2], guard[1] == "!") if guard else None
            self.statements.append(Statement(opcode, operands, negated, " ".join(text.split()), place))

    def register_type(self, name: str) -> str | None:
        """``pred``, ``b16``, ``b32``, ...; None for what is no register."""
        return self.registers.get(f"{name} alone") or self.registers.get(name.rstrip("0123456789"))


def _split(operands: str) -> list[str]:
    """At commas outside of braces and brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", operands)
    return [part.strip() for part in parts]


def vector(operand: str) -> list[str]:
    """The elements of ``{a, b}``; one element where there are no braces."""
    return [x.strip() for x in operand.strip("{}").split(",")] if operand.startswith("{") else [operand]


def address(operand: str) -> tuple[str, int]:
    """Base and offset of ``[base + offset]``."""
    matched = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if matched is None:
        raise PTXError(f"{operand} is no address")
    return matched[1], int(matched[2] or "0", 0)
