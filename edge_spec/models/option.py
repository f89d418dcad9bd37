"""Declares an option as a field of a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import EnumType
from functools import cache, partial
from types import MappingProxyType
from typing import Any, get_type_hints

_OPTION = "option"  # in the metadata of a field


@dataclass(frozen=True)
class Option:
    """Describes an option to its user, and says who understands it."""

    help: str  # one line of `--help`, of `load`'s docstring and of docs/cli.md
    panel: str | None = None  # of `--help`; None: that of no name
    flag: str | None = None  # where it is not the field's name with dashes, without "_s"
    metavar: str | None = None  # what stands for its value, where the type does not say it
    envvar: str | None = None  # of the environment, which sets it where the command line does not
    least: float | None = None  # that a number may be
    most: float | None = None
    read_as: Any = None  # the type that the command line reads, where it is not the field's
    more: str = ""  # what docs/cli.md says beside the help: Markdown
    runtimes: tuple[str, ...] = ()  # the only ones that understand it
    drafters: tuple[str, ...] = ()  # of ours that use it: a refusal names the first. Who uses it is
    # decided by what a drafter declares (`DrafterTraits.options`); without any, it is refused
    noun: str = ""  # what the refusal calls it
    in_auto: bool = False  # whether --drafter auto uses it, too
    also: tuple[str, ...] = ()  # names of it in other libraries, which `load` refuses with ours
    is_place: bool = False  # whether it says where a model runs, which a plan does, too


def option(
    default: Any, help: str, panel: str | None = None, *, repr: bool = True, **more: Any
) -> Any:
    """Declares a field with its default; more: of `Option`."""
    return field(default=default, repr=repr, metadata={_OPTION: Option(help, panel, **more)})


model_option = partial(option, panel="Model and drafting")


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
    hints = get_type_hints(group)
    found = {}
    for each in fields(group):
        if (declared := each.metadata.get(_OPTION)) is not None:
            found[each.name] = DeclaredOption(each.name, hints[each.name], each.default, declared)
    return MappingProxyType(found)  # cached: nobody may change it
