"""Errors as clients of Anthropic's API expect them."""

from __future__ import annotations

from typing import Any

from edge_spec.apps.server.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_document(error: ApiError) -> dict[str, Any]:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told: dict[str, Any] = {"type": _TYPES.get(error.status, other), "message": error.message}
    if error.param == "thread":  # clients that read this ask again without one
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told}
