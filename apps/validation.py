"""Has pydantic say of a value that came from outside what is wrong with the member of a union that
was meant, where it stands, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import Discriminator

_SHOWN = 60  # characters of a value
_OBJECTS = ("model_type", "model_attributes_type", "dict_type")


def chosen_by(tag: Callable[[Any], str | None], send: str) -> Discriminator:
    """Finds the member of a union that is meant, so that a refusal is of this one.

    tag: of the member; None: there is none. send: what a refusal says to send then.
    """
    return Discriminator(tag, custom_error_type="no_member", custom_error_message=f"send {send}")


def by_kind(
    send: str, kinds: Mapping[type, str], types: Mapping[str | None, str] | None = None
) -> Discriminator:
    """Finds the member by what JSON calls the value.

    kinds: the tag of each. types: the tags of objects by their `type`; None: of one without.
    """

    def tag(value: Any) -> str | None:
        if isinstance(value, dict) and types is not None:
            kind = value.get("type")
            return types.get(kind) if isinstance(kind, str | None) else None
        return kinds.get(type(value))

    return chosen_by(tag, send)


def place_of(
    error: Mapping[str, Any],
    loc: Sequence[str | int],
    body: Any,
    also: Collection[tuple[str, Any]] = (),
) -> list[str | int]:
    """Returns where a fault stands in the body: the places of pydantic's errors have the members
    of unions, too, and of names that stand for others, these.

    also: names, each with what it stands for.
    """
    path: list[str | int] = []
    value = body
    for part in loc:
        if isinstance(value, dict) and part not in value:
            part = next((name for name in value if (name, part) in also), part)
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue  # no part of the body
        path.append(part)
    if "member" in error.get("ctx", {}):
        path.append(error["ctx"]["member"])
    elif error["type"] == "missing" and loc:
        path.append(loc[-1])
    return path


def joined(path: Sequence[str | int]) -> str:
    """Returns it as JavaScript writes it, such as messages[3].content."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def fault_of(error: Mapping[str, Any]) -> str:
    """Says what is wrong with the value at a place; it goes on a sentence that begins with the
    place."""
    told = error.get("ctx", {})
    if "member" in told:
        return f" {told['fault']}"
    if error["type"] == "missing":
        return " is missing"
    if error["type"] == "extra_forbidden":
        return " is no field that is known here"
    if error["type"] == "no_member":
        return f": {shown(error['input'])} is not what it takes; {error['msg']}"
    message = str(told.get("error", error["msg"])).replace(" after validation", "")
    if error["type"] in _OBJECTS:
        message = "Input should be an object"
    elif error["type"] == "string_pattern_mismatch":
        message = f"Input should match {told['pattern']}"
    if message.startswith("Input "):
        message = f"{shown(error['input'])} {message.removeprefix('Input ')}"
    return f": {message}"


def shown(value: Any) -> str:
    """Returns a value as JSON, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
