"""Turns regular expressions of JSON Schema, which are JavaScript's, into those of Rust's regex
crate."""

from __future__ import annotations

import re


class UnknownPatternError(Exception):
    """A pattern that Rust's regular expressions cannot say."""


# Decimal numbers as pydantic writes their pattern, which looks ahead.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:(?P<free>\\d\*\\\.\?\\d\*)"
    r"|\(\?:\\d\{0,(?P<whole>\d+)\}"
    r"\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d+)\}0\*\))\$"
)
_ESCAPE = re.compile(
    r"\\(?:[pPu]\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[a-zA-Z]|k<|.)", re.DOTALL
)
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")


def as_rust(pattern: str) -> str:
    """Raises UnknownPatternError for one that looks around or refers back."""
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is not None:
        if decimal["free"]:
            return r"^[+-]?[0-9]+(?:\.[0-9]*)?$"
        return rf"^[+-]?[0-9]{{1,{decimal['whole']}}}(?:\.[0-9]{{0,{decimal['places']}}})?$"
    written: list[str] = []
    place, in_class = 0, False
    while place < len(pattern):
        read = _in_class if in_class else _outside
        taken, text, in_class = read(pattern[place : place + 64])
        written.append(text)
        place += taken
    return "".join(written)


def _outside(rest: str) -> tuple[int, str, bool]:
    """Returns how much of `rest` it has read, what that is in Rust, and whether a class began."""
    if rest[0] == "\\":
        taken, text = _escaped(rest)
        if text in (r"\b", r"\B"):
            raise UnknownPatternError("has a word boundary, which is not known")
        return taken, text, False
    if re.match(r"\(\?(?:=|!|<=|<!)", rest):
        raise UnknownPatternError("looks around, which is not known")
    if rest.startswith("[^]"):
        return 3, "(?s:.)", False
    if rest.startswith("[]"):
        return 2, "[a&&b]", False
    if rest[0] == "[":
        opening = "[^" if rest.startswith("[^") else "["
        return len(opening), opening, True
    counted = _COUNT.match(rest)
    if counted is not None:
        return counted.end(), counted[0], False
    return 1, f"\\{rest[0]}" if rest[0] in "{}]" else rest[0], False


def _in_class(rest: str) -> tuple[int, str, bool]:
    if rest[0] == "\\":
        taken, text = _escaped(rest)
        return taken, r"\x08" if text == r"\b" else text, True
    if rest[0] == "]":
        return 1, "]", False
    if rest.startswith("--"):  # a difference of classes, in Rust
        raise UnknownPatternError("has -- within brackets, which is not known")
    return 1, f"\\{rest[0]}" if rest[0] in "[&~" else rest[0], True


def _escaped(rest: str) -> tuple[int, str]:
    found = _ESCAPE.match(rest)
    if found is None:
        raise UnknownPatternError("ends with a backslash")
    text = found[0]
    if text[1] in "123456789" or text == r"\k<":
        raise UnknownPatternError("refers back, which is not known")
    if text[1] == "c" and len(text) == 3:
        text = f"\\x{ord(text[2]) % 32:02x}"
    return found.end(), {r"\0": r"\x00", r"\Z": r"\z"}.get(text, text)
