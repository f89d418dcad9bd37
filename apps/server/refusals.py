"""Says what is wrong with a request, in one line that names the member as the client wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from edge_spec.apps.server.body import Body
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.validation import fault_of, joined, place_of

Read = TypeVar("Read", bound=Body)

_OF_OLLAMA = {("think", "reasoning_effort"), ("format", "response_format")}


@cache
def _also() -> frozenset[tuple[str, str]]:
    """Returns all names that stand for a field of some object, with the field's."""
    kinds, pairs = [Body], set(_OF_OLLAMA)
    for kind in kinds:
        kinds += kind.__subclasses__()
        pairs |= set(kind.other_names.also.items())
    return frozenset(pairs)


def converted(kind: type[Read], body: dict[str, Any]) -> Read:
    """Returns the request that another API's stands for. Raises ApiError."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise refused_body({**first, "loc": ("body", *first["loc"])}, body) from error


def _flat(body: Any) -> Any:
    """Returns a body with Ollama's options beside its other members, as they are read."""
    options = body.get("options") if isinstance(body, dict) else None
    return {**options, **body} if isinstance(options, dict) else body


def refused_body(error: Mapping[str, Any], body: Any) -> ApiError:
    """Makes the first thing that pydantic found wrong with a body into what the client is told."""
    if error["type"] == "json_invalid":
        return ApiError(400, "The body is no valid JSON.")
    place, *loc = error["loc"]
    path = place_of(error, loc, _flat(body), _also()) if place == "body" else loc
    where = joined(path) or "The body"
    message = " ".join(f"{where}{fault_of(error)}".split())
    message += "" if message.endswith("?") else "."
    return ApiError(400, message, param=str(path[0]) if path else None)
