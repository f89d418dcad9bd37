"""Says what is wrong with a request, in one line that names the member as the client wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.other_servers import ANSWER_ALSO

_SHOWN = 60  # characters of a value
_OBJECTS = ("model_type", "model_attributes_type", "dict_type")


def refused_body(error: Mapping[str, Any], body: Any) -> ApiError:
    """Makes the first thing that pydantic found wrong with a body into what the client is told."""
    if error["type"] == "json_invalid":
        return ApiError(400, "The body is no valid JSON.")
    place, *loc = error["loc"]
    path = as_written(loc, body) if place == "body" else loc
    told = error.get("ctx", {})
    if "member" in told:
        path = [*path, told["member"]]
    elif error["type"] == "missing" and loc:
        path = [*path, loc[-1]]
    where = joined(path) or "The body"
    message = " ".join(f"{where}{_fault(error)}".split())
    message += "" if message.endswith("?") else "."
    return ApiError(400, message, param=str(path[0]) if path else None)


def as_written(loc: Sequence[str | int], body: Any) -> list[str | int]:
    """Returns where a value stands in the body: the places of pydantic's errors have the members
    of unions, too, and our names where the client wrote another server's."""
    path: list[str | int] = []
    value = body
    for part in loc:
        if not path and isinstance(value, dict) and part not in value:
            part = next((name for name in value if ANSWER_ALSO.get(name) == part), part)
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue  # no part of the body
        path.append(part)
    return path


def joined(path: Sequence[str | int]) -> str:
    """Returns it as JavaScript writes it, such as messages[3].content."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _fault(error: Mapping[str, Any]) -> str:
    """Says what is wrong with the value at a place; it goes on a sentence that begins with the
    place."""
    told = error.get("ctx", {})
    if "member" in told:
        return f" {told['fault']}"
    if error["type"] == "missing":
        return " is missing"
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
