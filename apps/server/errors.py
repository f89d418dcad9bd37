"""Errors, in the form that each API's clients expect."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from edge_spec import EdgeSpecError
from edge_spec.errors import (
    ContextFullError,
    DeviceMemoryError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)

# Matches remedies for the operator: clients can neither set options nor install packages.
_COMMAND = re.compile(r"(?<![\w-])--?[a-z]|`|\bedge-spec |\bpip install\b")
_STATUSES: tuple[tuple[type[EdgeSpecError], int], ...] = (
    (UsageError, 400),
    (UnsupportedModelError, 400),
    (MissingDependencyError, 501),
)
_log = logging.getLogger(__name__)
_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_TYPES,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal. param: the field of the request at fault."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def document(self, path: str) -> dict[str, Any]:
        """Return the response's body in the form of the API that `path` belongs to."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            other = "api_error" if self.status >= 500 else _INVALID
            kind = _ANTHROPIC_TYPES.get(self.status, other)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID)
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def api_error(error: Exception) -> ApiError:
    """Return what clients may know of an error: of an unexpected one, only its type."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EdgeSpecError):
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
        code = "context_length_exceeded" if isinstance(error, ContextFullError) else None
        return ApiError(status, _for_client(error, status), code=code)
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, "The request has a string that is no Unicode text.")
    return ApiError(500, f"The server failed: {type(error).__name__}.")


def error_response(error: Exception, path: str) -> Response:
    """Return an error's response. path: the request's."""
    told = api_error(error)
    body = json.dumps(told.document(path)).encode()  # ASCII, as messages may quote anything
    return Response(body, told.status, told.headers, "application/json")


def refused(member: str, fault: str) -> ApiError:
    """Return the error for a field of the request."""
    return ApiError(400, f"{member} {fault}", param=member.partition(".")[0])


def overloaded(message: str) -> ApiError:
    return ApiError(429, message, code="overloaded", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", headers={"Retry-After": "5"})


def timed_out() -> ApiError:
    return ApiError(504, "The answer has taken longer than the server allows.", code="timeout")


def cannot_be_opened(name: str, error: Exception) -> ApiError:
    """Return the error for a model that fails to open, without remedies that clients cannot use."""
    told = error.shown if isinstance(error, EdgeSpecError) else type(error).__name__
    return ApiError(
        503 if isinstance(error, DeviceMemoryError) else 500,
        f"Model {name!r} cannot be opened: {told}. Ask for another model; GET /v1/models lists "
        "them.",
        code="model_not_loaded",
        param="model",
        headers={"X-Should-Retry": "false"},
    )


def _for_client(error: EdgeSpecError, status: int) -> str:
    """Return the error's text for a client. Remedies for the operator go to the log."""
    if isinstance(error, ContextFullError):  # clients look for these words
        return f"This model's maximum context length is exceeded: {error}"
    if not _COMMAND.search(error.remedy):
        return str(error)
    if status < 500:
        return f"{error.shown}."
    _log.warning("%s", error)
    return f"{error.shown}. Tell whoever runs the server; its log says what to do."
