"""The list of models as Anthropic's clients read it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from starlette.responses import JSONResponse, Response

from edge_spec.apps.server.anthropic.errors import error_document
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.models import Models, ServedModel

_DIGITS = 4  # of a limit


def asks_for_its_form(headers: Mapping[str, str]) -> bool:
    """Tells whether a request for models, whose paths two APIs share, is of Anthropic's."""
    return "anthropic-version" in headers


def _document(model: ServedModel, since: datetime) -> dict[str, Any]:
    """Describes one; its limits are known once it was open."""
    limit = model.description and model.description.info["context_length"]
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": since.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }


def found_model(models: Models, name: str, since: datetime) -> Response:
    try:
        return JSONResponse(_document(models.find(name), since))
    except ApiError as error:
        return JSONResponse(error_document(error), error.status)


def models_page(models: Models, asked: Mapping[str, str], since: datetime) -> dict[str, Any]:
    """asked: the query, with `limit`, and `after_id` or `before_id`."""
    listed = list(models)
    names = [model.name for model in listed]
    given = asked.get("limit", "")[:_DIGITS]
    limit = max(1, int(given)) if given.isascii() and given.isdigit() else len(listed)
    if asked.get("before_id") in names:
        listed = listed[: names.index(asked["before_id"])]
        page = listed[-limit:]
    else:
        if asked.get("after_id") in names:
            listed = listed[names.index(asked["after_id"]) + 1 :]
        page = listed[:limit]
    data = [_document(model, since) for model in page]
    return {
        "data": data,
        "has_more": len(page) < len(listed),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
