"""Declares an option as a field of a dataclass that is annotated with an `Option`, refuses values
of another type than it takes, and finds the one that a wrong name means."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from enum import EnumType
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

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


@dataclass(frozen=True)
class Option:
    """Describes an option to its user, and says who understands it."""

    help: str  # one line of `--help`, of `load`'s docstring and of docs/cli.md
    panel: str | None = "Model and drafting"  # of `--help`; None: that of no name
    flag: str | None = None  # where it is not the field's name with dashes, without "_s"
    metavar: str | None = None  # what stands for its value, where the type does not say it
    envvar: str | None = None  # of the environment, which sets it where the command line does not
    least: float | None = None  # that a number may be
    read_as: Any = None  # the type that the command line reads, where it is not the field's
    more: str = ""  # what docs/cli.md says beside the help: Markdown
    runtimes: tuple[str, ...] = ()  # the only ones that understand it
    drafters: tuple[str, ...] = ()  # of ours that use it: a refusal names the first. Who uses it is
    # decided by what a drafter declares (`DrafterTraits.options`); without any, it is refused
    noun: str = ""  # what the refusal calls it
    in_auto: bool = False  # whether --drafter auto uses it, too
    also: tuple[str, ...] = ()  # names of it in other libraries, which `load` refuses with ours
    is_place: bool = False  # whether it says where a model runs, which a plan does, too


@dataclass(frozen=True)
class DeclaredOption:
    """A field with its option, and what follows from both."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def is_in_seconds(self) -> bool:
        """Says whether the field's name ends in that unit, which the help of its flag tells."""
        return self.name.endswith("_s")

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.name.removesuffix('_s').replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        """Says whether there is no default."""
        return self.default is MISSING

    @property
    def read_as(self) -> Any:
        return self.type if self.option.read_as is None else self.option.read_as

    @property
    def command_line_default(self) -> Any:
        """Returns None for a list: nothing was given on the command line."""
        if self.default == ():
            return None
        is_choice = isinstance(self.read_as, EnumType)
        return self.read_as(self.default) if is_choice else self.default

    def from_command_line(self, value: Any) -> Any:
        """Returns the field's value of what was read; None and lists become its own."""
        if value is None:
            return self.default
        return tuple(value) if isinstance(value, list) else value


@cache
def declared_options(group: type) -> Mapping[str, DeclaredOption]:
    """Returns the options by name, in the order of their fields; fields without an `Option` are
    left out."""
    hints = get_type_hints(group, include_extras=True)
    found = {}
    for field in fields(group):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        type_, *rest = get_args(hints[field.name])
        for option in rest:
            if isinstance(option, Option):
                found[field.name] = DeclaredOption(field.name, type_, field.default, option)
    return MappingProxyType(found)  # cached: nobody may change it


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
