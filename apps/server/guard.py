"""The checks that every request passes first: who may ask, how much, and what browsers may do."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_spec.apps.server.errors import ApiError, error_response
from edge_spec.apps.server.options import ServerOptions

_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/static/"
_KEY_HEADERS = ("api-key", "x-api-key")  # of clients made for Azure's API, or Anthropic's
_ROOMS = ("chat", "completions", "messages", "models", "responses")  # what follows /v1/
_DISCARDED = 16  # times the limit of a body: read, so that its sender gets to read the answer
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI: checks host, key, type and size of a request and reads its body before `app` sees
    it. HEAD is asked of `app` as GET; the connection leaves the body out."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, observe: Callable[[str, int], None]
    ) -> None:
        """observe: called with the path and the status of each request."""
        self._app = app
        self._observe = observe
        self._options = options
        self._key = (options.api_key or "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": plain_path(scope["path"])}

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope["path"], message["status"])
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""))
            self._check_key(scope["path"], headers)
            if method == "POST":
                _check_type(headers.get("content-type", ""))
                receive = await self._read(headers, receive)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_guarded)
        except _DisconnectError:
            pass
        else:
            await self._app(scope, receive, send_guarded)

    def _check_host(self, host: str) -> None:
        """Where a key is needed, no page of another site can ask."""
        if self._options.is_loopback and not self._options.allows_host(host):
            raise ApiError(
                403,
                f"This server answers to localhost, not to {host[:100]!r}. Whoever runs it can "
                "allow that name with --allow-host.",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._key or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return
        if not any(hmac.compare_digest(key, self._key) for key in _keys(headers)):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body, and return what gives it, and then what comes after it."""
        limit, closes = self._options.max_body_bytes, {"Connection": "close"}
        told = f"The body has more than {limit} bytes."
        too_large = ApiError(413, told, code="request_too_large", headers=closes)
        body, num_bytes, more = bytearray(), 0, True
        waits_for_leave = headers.get("expect", "").lower() == "100-continue"
        length = headers.get("content-length", "0")
        if waits_for_leave and length.isdigit() and int(length) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._options.client_timeout_s):
                while more and num_bytes <= _DISCARDED * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _DisconnectError
                    num_bytes += len(message.get("body", b""))
                    if num_bytes <= limit:
                        body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, "The body took too long.", headers=closes) from None
        if num_bytes > limit:
            raise too_large
        whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay


def _keys(headers: Headers) -> Iterator[bytes]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip().encode("latin-1")
    for name in _KEY_HEADERS:
        if name in headers:
            yield headers[name].strip().encode("latin-1")


def _check_type(kind: str) -> None:
    """A form of another site needs no permission to be sent, but it cannot be JSON."""
    if kind.lower().partition(";")[0].strip() != "application/json":
        raise ApiError(415, "The body has to be JSON: Content-Type: application/json.")


def plain_path(path: str) -> str:
    """Return the path without doubled slashes, and with /v1 once where it belongs."""
    parts = [part for part in path.split("/") if part]
    while parts[:2] == ["v1", "v1"]:
        del parts[0]
    if parts and parts[0] in _ROOMS:
        parts.insert(0, "v1")
    return "/" + "/".join(parts)


class _DisconnectError(Exception):
    """The client has left."""
