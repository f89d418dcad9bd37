"""The checks that every request passes first: who may ask, how much, and what browsers may do."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_spec.apps.server.addresses import is_allowed_host, plain_path
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.reply import send_error

_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/static/"
_KEY_HEADERS = (b"api-key", b"x-api-key")  # of clients made for Azure's API, or Anthropic's
_DISCARDED = 16  # times the limit of a body: read, so that its sender gets to read the answer
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guard:
    """ASGI: checks host, key, type and size of a request, and reads its body, before `app` sees it,
    at the path that is meant. HEAD is asked of `app` as GET, whose body the connection leaves
    out."""

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
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            if method == "POST":
                _check_type(headers)
                receive = _replayed(await self._body(headers, receive), receive)
        except ApiError as error:
            await send_error(send_guarded, error, scope["path"])
            return
        except _DisconnectError:
            return
        await self._app(scope, receive, send_guarded)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Where a key is needed, no page of another site can ask."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._options.is_loopback and not is_allowed_host(host, self._options.allowed_hosts):
            raise ApiError(
                403,
                f"This server answers to localhost, not to {host[:100]!r}. Whoever runs it can "
                "allow that name with --allow-host.",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._key or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return
        if not any(hmac.compare_digest(key, self._key) for key in _keys(headers)):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._options.max_body_bytes
        too_large = ApiError(
            413,
            f"The body has more than {limit} bytes.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        body, num_bytes, more = bytearray(), 0, True
        waits_for_leave = headers.get(b"expect", b"").lower() == b"100-continue"
        length = headers.get(b"content-length", b"0")
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
            raise ApiError(
                408, "The body took too long.", headers={"Connection": "close"}
            ) from None
        if num_bytes > limit:
            raise too_large
        return bytes(body)


def _keys(headers: dict[bytes, bytes]) -> Iterator[bytes]:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        yield key.strip()
    for name in _KEY_HEADERS:
        if name in headers:
            yield headers[name].strip()


def _check_type(headers: dict[bytes, bytes]) -> None:
    """A form of another site needs no permission to be sent, but it cannot be JSON."""
    kind = headers.get(b"content-type", b"").lower().partition(b";")[0]
    if kind.strip() != b"application/json":
        raise ApiError(415, "The body has to be JSON: Content-Type: application/json.")


class _DisconnectError(Exception):
    """The client has left."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then what comes after it."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
