"""Errors as clients of OpenAI's API expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edge_spec import EdgeSpecError
from edge_spec.errors import (
    ContextFullError,
    DeviceMemoryError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal, with the status and the body that tell it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        return json.dumps(self.document()).encode()  # ASCII: a message may quote anything


def api_error(error: Exception) -> ApiError:
    """What clients are told of an error. Of one that was not raised on purpose, only its kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, UsageError | UnsupportedModelError):
        return ApiError(400, str(error))
    if isinstance(error, MissingDependencyError):
        return ApiError(501, str(error))
    if isinstance(error, EdgeSpecError):
        return ApiError(500, str(error))
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, "The request has a string that is no Unicode text.")
    return ApiError(500, f"The server failed: {type(error).__name__}.")


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", headers={"Retry-After": "5"})


def cannot_be_opened(name: str, error: Exception) -> ApiError:
    """What clients are told of a model that cannot be opened: what whoever runs the server can do
    about it is not theirs to do. OpenAI's client does not ask again on its own."""
    told = error.shown if isinstance(error, EdgeSpecError) else type(error).__name__
    return ApiError(
        503 if isinstance(error, DeviceMemoryError) else 500,
        f"Model {name!r} cannot be opened: {told}. Ask for another model; GET /v1/models lists "
        "them.",
        code="model_not_loaded",
        param="model",
        headers={"X-Should-Retry": "false"},
    )
