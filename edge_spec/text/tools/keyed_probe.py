"""Finds out from a chat template how it writes the arguments of calls one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_spec.text.template_probes import CALLED
from edge_spec.text.tools.keyed_form import KeyedForm
from edge_spec.text.tools.literals import num_shared
from edge_spec.text.tools.value_style import ValueStyle

_CALLS = (CALLED, "probe_again")
_KEYS = ("probe_other", "probe_argument")  # not in the order of their letters
_TEXTS = ("probe-value", "probe-more")
_WORDS = (*_CALLS, *_KEYS, *_TEXTS)
_TRICKY = "probe<b>\n&"
_NUMBER = 70707
_PART_OF_TAG = re.compile(r"<[^<>]*$")
# Renders an answer with these calls, and returns what the model would have written of it.
Calls = Sequence[tuple[str, Mapping[str, Any]]]
RenderCalls = Callable[[Calls], str | None]


@dataclass(frozen=True)
class _Parts:
    """A call with two arguments, split at the names and texts in it."""

    opening: str
    head: str
    key_closing: str
    middle: str  # between the first value and the second name
    rest: str
    order: tuple[str, str]


def keyed_form(render: RenderCalls) -> KeyedForm | None:
    """Returns None where the template writes calls otherwise."""
    texts = _parts(render, _TEXTS)
    numbers = _parts(render, (_NUMBER, _NUMBER + 1))
    if texts is None or numbers is None or texts.opening != numbers.opening:
        return None
    quote = _quote(texts, numbers)
    value_closing = "" if quote else _shared_start(texts.middle, texts.rest)
    key_opening = "" if quote else texts.middle.removeprefix(value_closing)
    marks = (texts.head, texts.key_closing, texts.middle, texts.rest)
    if not texts.opening.strip() or any(word in mark for word in _WORDS for mark in marks):
        return None  # a name stands in other places, too
    if not (quote or value_closing.strip()):
        return None
    comma = (texts.middle.removeprefix(quote) or ", ") if quote else ""
    if not texts.head.endswith(key_opening):
        comma, key_opening = key_opening, ""
    closing = texts.rest.removeprefix(quote or value_closing)
    is_told = not quote and numbers.key_closing != texts.key_closing
    return KeyedForm(
        opening=texts.opening.lstrip(),
        head=texts.head.removesuffix(key_opening),
        key_opening=key_opening,
        key_closing=texts.key_closing.removesuffix(quote),
        value_closing=value_closing,
        closing=closing,
        between=_between(render, closing),
        comma=comma,
        plain_key_closing=numbers.key_closing if is_told else None,
        style=_style(render, quote, texts),
        is_sorted=texts.order != _KEYS,
    )


def _parts(render: RenderCalls, values: Sequence[Any]) -> _Parts | None:
    text = render([(_CALLS[0], dict(zip(_KEYS, values, strict=True)))])
    if text is None:
        return None
    order = _KEYS if text.find(_KEYS[0]) < text.find(_KEYS[1]) else (_KEYS[1], _KEYS[0])
    shown = [str(value) for value in (values if order == _KEYS else values[::-1])]
    found: list[str] = []
    for word in (_CALLS[0], order[0], shown[0], order[1], shown[1]):
        before, word, text = text.partition(word)
        if not word:
            return None
        found.append(before)
    opening, head, key_closing, middle, again = found
    return None if again != key_closing else _Parts(opening, head, key_closing, middle, text, order)


def _quote(texts: _Parts, numbers: _Parts) -> str:
    """Returns what stands around a text and around no number; "" where that is nothing. Some
    templates write quotes around the numbers of Python's calls, too."""
    if texts.head.strip() == "(" and texts.key_closing.strip() in ("='", '="'):
        quote = texts.key_closing.strip()[-1]
        if texts.middle.startswith(quote) and texts.rest.startswith(f"{quote})"):
            return quote
    quote = texts.key_closing.removeprefix(numbers.key_closing)
    is_around = quote and texts.middle == quote + numbers.middle and texts.rest.startswith(quote)
    return quote if is_around and texts.key_closing.startswith(numbers.key_closing) else ""


def _shared_start(text: str, other: str) -> str:
    """Returns what both begin with, up to the end of a tag."""
    return _PART_OF_TAG.sub("", text[: num_shared(text, other)])


def _between(render: RenderCalls, closing: str) -> str | None:
    """Returns what stands between the last argument of a call and the name of the next."""
    one, two = (
        render([(name, {_KEYS[1]: _TEXTS[0]}) for name in _CALLS[:count]]) for count in (1, 2)
    )
    if one is None or two is None:
        return None
    after_value = one.rpartition(_TEXTS[0])[2].removesuffix(closing)
    _, _, rest = two.partition(_TEXTS[0])
    between, found, again = rest.partition(_CALLS[1])
    is_whole = found and _TEXTS[0] in again and between.startswith(after_value)
    return between.removeprefix(after_value) if is_whole else None


def _style(render: RenderCalls, quote: str, texts: _Parts) -> ValueStyle:
    words = render([(_CALLS[0], {_KEYS[0]: True})]) or ""
    has_python_words = "True" in words
    if quote:
        own = len(quote) > 1
        comma = texts.middle.removeprefix(quote) if own else ", "
        colon = texts.key_closing.removesuffix(quote) if own else ": "
        return ValueStyle(quote, comma, colon, has_python_words=has_python_words or not own)
    tricky = render([(_CALLS[0], {_KEYS[0]: _TRICKY})]) or ""
    before, found, after = tricky.partition(_TRICKY)
    opening = before.rpartition(texts.key_closing)[2]
    closing = after[: after.find(texts.middle[:1])] if opening else ""
    is_wrapped = bool(found and opening and closing and len(opening) < 20)
    wrap = (opening, closing) if is_wrapped else ("", "")
    return ValueStyle(wrap=wrap, has_python_words=has_python_words)
