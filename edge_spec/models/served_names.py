"""Names the models of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_spec.errors import UsageError
from edge_spec.models.hub.reference import HubReference, is_on_hub
from edge_spec.models.source import Source

_FORM = "Write --alias NAME=MODEL, with MODEL as it was given or as it is called."


@dataclass(frozen=True)
class ServedNames:
    """name: what lists and answers have; aliases: what requests may say, too."""

    name: str
    aliases: tuple[str, ...] = ()


def served_names(models: Sequence[str], asked: Sequence[str]) -> list[ServedNames]:
    """Returns the names of models: the first alias that was asked for goes before a model's own
    name, which it keeps as another one where no other model has it. Nothing is fetched.

    asked: "NAME=MODEL", or "NAME" where there is one model. Raises UsageError for an alias of no
    model and for a name of several, ModelFileError for a MODEL that does not exist.
    """
    own = [_own_name(model) for model in models]
    given: list[list[str]] = [[] for _ in models]
    for alias in asked:
        name, model = _read_alias(alias, models)
        given[_index(model, models, own)].append(name)
    names = [
        list(dict.fromkeys([*aliases, name] if not aliases or own.count(name) == 1 else aliases))
        for aliases, name in zip(given, own, strict=True)
    ]
    every = [name for each in names for name in each]
    for name in every:
        if every.count(name) > 1:
            raise UsageError(
                f"two models are called {name!r}", remedy=f"Give one another name. {_FORM}"
            )
    return [ServedNames(each[0], tuple(each[1:])) for each in names]


def _own_name(model: str) -> str:
    source = Source(model, lambda what, fraction: None)
    if not is_on_hub(model) or source.is_fetched:
        return source.name
    reference = HubReference.parse(model)
    return reference.name if reference.file is None else Path(reference.file).stem


def _read_alias(alias: str, models: Sequence[str]) -> tuple[str, str]:
    name, equals, model = alias.partition("=")
    if not name.isprintable() or not name.strip():
        raise UsageError(f"{alias!r} gives no name", remedy=_FORM)
    if equals:
        return name, model
    if len(models) > 1:
        raise UsageError(f"--alias {alias} does not say of which model", remedy=_FORM)
    return name, models[0]


def _index(model: str, models: Sequence[str], own: Sequence[str]) -> int:
    """Returns the place of the one model that was given so, or that is called so."""
    found = [i for i, each in enumerate(models) if each == model]
    found = found or [i for i, name in enumerate(own) if name == model]
    if len(found) != 1:
        what = "no model" if not found else "more than one model"
        raise UsageError(f"{what} of this server is {model!r}", remedy=_FORM)
    return found[0]
