"""Reads grammars as llama.cpp has them."""

from __future__ import annotations

import re

_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_ESCAPES = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
# A text, a class of characters, a comment, or the name of a rule that is Lark's for `root`.
_START = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*|(?<![\w-])(start)(?![\w-])')


def as_lark(gbnf: str) -> str:
    """Returns the grammar in llguidance's variant of Lark's syntax, one that is in it already as it
    is. Raises ValueError for one that cannot be read."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(gbnf):
        return gbnf
    try:
        lark: str = gbnf_to_lark(_START.sub(_renamed, _ESCAPES.sub(_spelled, gbnf)))
        return lark
    except Exception as error:  # of a small parser, which raises anything for what is no grammar
        raise ValueError(str(error) or type(error).__name__) from None


def _spelled(escape: re.Match[str]) -> str:
    """Returns the character, which the parser would write in a way that nobody reads."""
    code = int(escape[1] or escape[2] or "0", 16)
    is_character = 0x80 <= code < 0xD800 or 0xE000 <= code < 0x110000
    return chr(code) if is_character else escape[0]


def _renamed(found: re.Match[str]) -> str:
    return "start-of-gbnf" if found[1] else found[0]
