"""Errors as clients of OpenAI's API expect them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
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

# Remedies of the command line: a client can give no options and install nothing.
_COMMAND = re.compile(r"(?<![\w-])--?[a-z]|`|\bedge-spec |\bpip install\b")
_STATUSES: tuple[tuple[type[EdgeSpecError], int], ...] = (
    (UsageError, 400),
    (UnsupportedModelError, 400),
    (MissingDependencyError, 501),
)
_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal, with the status and the body that tell it."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def document(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, other)
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    def body(self, path: str) -> bytes:
        """path: what was asked for; it tells which API's form the client reads."""
        beginning = next((each for each in OTHER_FORMS if path.startswith(each)), None)
        document = OTHER_FORMS[beginning](self) if beginning else self.document()
        return json.dumps(document).encode()  # ASCII: a message may quote anything


# Makes documents of errors for APIs other than OpenAI's, by what their paths begin with.
OTHER_FORMS: dict[str, Callable[[ApiError], dict[str, Any]]] = {}


def api_error(error: Exception) -> ApiError:
    """Return what clients may know of an error: only its kind if it was not raised on purpose."""
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
    """path: what was asked for."""
    told = api_error(error)
    return Response(told.body(path), told.status, told.headers, "application/json")


def refused(member: str, fault: str) -> ApiError:
    """Return the error of a member of the request."""
    return ApiError(400, f"{member} {fault}", param=member.partition(".")[0])


def overloaded(message: str) -> ApiError:
    return ApiError(429, message, code="overloaded", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", headers={"Retry-After": "5"})


def timed_out() -> ApiError:
    return ApiError(504, "The answer has taken longer than the server allows.", code="timeout")


def cannot_be_opened(name: str, error: Exception) -> ApiError:
    """Return the error of a model that cannot be opened, without remedies that clients cannot
    use."""
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
    if isinstance(error, ContextFullError):  # in the words that clients look for
        return f"This model's maximum context length is exceeded: {error}"
    if not _COMMAND.search(error.remedy):
        return str(error)
    if status < 500:
        return f"{error.shown}."
    _log.warning("%s", error)
    return f"{error.shown}. Tell whoever runs the server; its log says what to do."
