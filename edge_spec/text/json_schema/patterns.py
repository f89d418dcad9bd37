"""Turns regular expressions of JSON Schema, which are JavaScript's, into those of Rust's regex
crate, and finds these in texts."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from threading import Lock
from typing import Any

from edge_spec.text.llguidance_library import open_llguidance

_searching = Lock()


class UnknownPatternError(Exception):
    """A pattern that Rust's regular expressions cannot say, or that cannot be searched for."""


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


def is_found(pattern: str, text: str) -> bool:
    """Says whether a text has a pattern of Rust's, as answers are held to it. Anybody may have
    written the pattern, and for some Python's `re` takes time exponential in the text's length.
    Raises UnknownPatternError for what is no pattern, MissingDependencyError without llguidance."""
    matcher = _matcher(pattern)
    written = list(json.dumps(text, ensure_ascii=False).encode(errors="replace"))
    with _searching:
        is_whole = bool(matcher.validate_tokens(written) == len(written))
        if matcher.is_error():
            raise UnknownPatternError("is too large")
    return is_whole


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Any:
    """Returns what reads bytes of a JSON string that has the pattern."""
    library = open_llguidance()
    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        source = library.LLMatcher.grammar_from_json_schema(schema)
        matcher = library.LLMatcher(library.LLTokenizer("byte"), source, log_level=0)
        fault = matcher.get_error()
    except ValueError as error:
        fault = str(error)
    if fault:
        raise UnknownPatternError(f"is no pattern: {' '.join(fault.split())[:300]}")
    return matcher


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
