"""Refuses values of another type than an option takes, and finds the option that a wrong name
means."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from edge_spec.core.sampling_params import is_number, is_whole
from edge_spec.errors import UsageError

_ALIKE = 0.6  # of the letters of a name, from which on it may be what was meant
_KINDS: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: ("a whole number", is_whole),
    float: ("a number", is_number),
    Path: ("a path", lambda value: isinstance(value, os.PathLike)),
    NoneType: ("None", lambda value: value is None),
}


def require_type(name: str, value: Any, taken: Any, help: str = "") -> None:
    """Raises UsageError with what the option is unless its value is of the type that it takes."""
    if not _is_of(value, taken):
        raise UsageError(
            f"{name} is {reprlib.repr(value)}",
            remedy=f"It takes {_described(taken)}. {help}".rstrip(),
        )


def _is_of(value: Any, taken: Any) -> bool:
    origin = get_origin(taken)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(taken))
    if origin is Sequence:  # a text is one of characters, which nobody means
        (item,) = get_args(taken)
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_is_of(each, item) for each in value)
    if taken in _KINDS:
        return _KINDS[taken][1](value)
    is_function = origin is not None and issubclass(origin, Callable)  # type: ignore[arg-type]
    return callable(value) if is_function else isinstance(value, origin or taken)


def _described(taken: Any) -> str:
    origin = get_origin(taken)
    if origin in (Union, UnionType):
        return " or ".join(_described(each) for each in get_args(taken))
    if origin is Sequence:
        items = get_args(taken)[0]
        kinds = get_args(items) if get_origin(items) in (Union, UnionType) else (items,)
        return f"a list of {' or '.join(_described(each).partition(' ')[2] for each in kinds)}s"
    if taken in _KINDS:
        return _KINDS[taken][0]
    named = origin or taken
    return "a function" if named is Callable else f"a {named.__name__}"


def meant(name: str, names: Iterable[str], others: Mapping[str, str]) -> str | None:
    """Returns which of the names is meant by one that is none of them: the same word written in
    another way, one of the `others`, or the nearest of all; None where nothing resembles it."""
    plain = _plain(name)
    known = {_plain(each): each for each in names}
    every = {_plain(other): each for other, each in others.items()} | known
    if plain in every:
        return every[plain]
    near = get_close_matches(plain, known, n=1, cutoff=_ALIKE)
    near = near or get_close_matches(plain, every, n=1, cutoff=_ALIKE)
    return every[near[0]] if near else None


def _plain(name: str) -> str:
    """Returns it in small letters without what joins its words."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
