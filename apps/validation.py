"""What pydantic found wrong with a value from outside, in one line that names the place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

_SHOWN = 60  # characters of a value
_READ = 50  # faults: a wrong list may have one for each of its items
_OBJECTS = ("model_type", "model_attributes_type", "dict_type")


def told(faults: Iterable[Mapping[str, Any]], body: Any) -> tuple[list[str | int], str]:
    """Return the place of the fault to tell, and the line. Of the members of a union the one that
    the value follows furthest is meant; where it has the type of none, all types are named."""
    placed = [(_place(each, body), each) for each in islice(faults, _READ)]
    ranks = [(len(place), not each["type"].endswith("_type")) for place, each in placed]
    meant = [each for each, rank in zip(placed, ranks, strict=True) if rank == max(ranks)]
    place = meant[0][0]
    first, *others = dict.fromkeys(_fault(each) for at, each in meant if at == place)
    start, should, _ = first.partition(" should be ")
    alike = [each for each in others if should and each.startswith(start + should)]
    also = "".join(f" or {each.removeprefix(start + should)}" for each in alike)
    return place, (joined(place) or "The body") + first + also


def _place(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """Return where a fault is in the body: pydantic's places name the members of unions, too, and
    members by our names for them."""
    value = body
    place: list[str | int] = []
    for part in fault["loc"]:
        if isinstance(value, dict) and part not in value:
            names = [name for name, each in value.items() if each is fault["input"]]
            part = names[0] if len(names) == 1 else part
        try:
            value = value[part]
        except (LookupError, TypeError):
            if place or not isinstance(part, str):
                continue  # no part of the body
            value = None
        place.append(part)
    if "member" in fault.get("ctx", {}):
        place.append(fault["ctx"]["member"])
    elif fault["type"].startswith("union_tag"):
        place.append("type")
    elif fault["type"].startswith("missing") and place != [*fault["loc"]]:
        place.append(fault["loc"][-1])
    return place


def joined(path: Sequence[str | int]) -> str:
    """Return it as JavaScript writes it, such as messages[3].content."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _fault(fault: Mapping[str, Any]) -> str:
    """Return what is wrong, to follow the place."""
    context, kind = fault.get("ctx", {}), fault["type"]
    if "member" in context:
        return f" {context['fault']}"
    if kind.startswith("missing") or kind == "union_tag_not_found":
        return " is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return " is no field that is known here"
    message = str(context["error"]) if kind == "value_error" else fault["msg"]
    message = message.replace(" after validation", "")
    if kind in _OBJECTS:
        message = "Input should be an object"
    if message.startswith("Input "):
        message = f"{shown(fault['input'])} {message.removeprefix('Input ')}"
    return f": {message}"


def shown(value: Any) -> str:
    """Return a value as JSON, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
