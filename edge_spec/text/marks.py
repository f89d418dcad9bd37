"""Puts marks into what a chat template is given, and finds them in what it makes of that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from edge_spec.text.plain_messages import ROLES


class Marker:
    """Puts the mark after each character that may be part of a control token. Other texts stay as
    they are: a template may count their characters."""

    def __init__(
        self,
        mark: str,
        may_take_part: Callable[[str], bool],
        symbols: re.Pattern[str],
        names: frozenset[str],
        kept: Sequence[str],
    ) -> None:
        """kept: parts of a text that stay as they are."""
        self._mark = mark
        self._may_take_part = may_take_part
        self._symbols = symbols
        self._names = names
        self._kept = {self._after_symbols(text): text for text in kept}

    def __call__(self, text: str) -> str:
        if not self._may_take_part(text):
            return text
        marked = self._after_symbols(text)
        for each, plain in self._kept.items():
            marked = marked.replace(each, plain)
        word = text.strip()
        return marked.replace(word, word + self._mark) if word in self._names else marked

    def _after_symbols(self, text: str) -> str:
        return self._symbols.sub(rf"\g<0>{self._mark}", text)


def texts_of(value: Any) -> Iterator[str]:
    """Yields all that is in messages, tools and options, but for roles, which are checked."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(name)
            if name != "role" or each not in ROLES:
                yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(name, change): mapped(each, change) for name, each in value.items()}
    return [mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


def marked_places(marked: str, mark: str) -> list[int]:
    """Returns where marked characters stand once the marks are away."""
    return [end - 1 for end in accumulate(map(len, marked.split(mark)[:-1]))]
