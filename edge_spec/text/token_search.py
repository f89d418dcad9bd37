"""Finds the texts of tokens in a text, however many there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_END = ""


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of these, the longest that begins at a place; nothing where there are none.

    Common beginnings are shared: a list of alternatives is tried one after the other, and some
    vocabularies have thousands of special tokens.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_written(tree) if tree else r"(?!)")


def occurrences(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """Yields where each begins and ends, also those that overlap."""
    found = pattern.search(text)
    while found:
        yield found.span()
        found = pattern.search(text, found.start() + 1)


def _written(node: dict[str, Any]) -> str:
    """Returns the pattern of what may follow. A token is a hundred characters at most."""
    branches = [re.escape(each) + _written(after) for each, after in node.items() if each != _END]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and _END not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if _END in node else joined
