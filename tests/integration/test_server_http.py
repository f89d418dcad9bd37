"""What clients send around a request: methods, paths, headers, hosts, origins; and how a stream is
kept alive."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from edge_spec.apps.server.running import listen
from edge_spec.errors import DeviceError
from fixtures.server_requests import CHAT, COMPLETIONS, HELLO

Serve = Callable[..., httpx.Client]
MODELS = "/v1/models"
JSON = {"Content-Type": "application/json"}
BODY = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
TRIES = 5  # with a free port, which another program may have on the other address of localhost
GETS = [MODELS, "/v1/models/tiny", "/health", "/metrics", "/openapi.json", "/edge-spec/info"]
GETS += ["/edge-spec/plan", "/props", "/", "/static/index.html"]


def said(client: httpx.Client, *pieces: bytes) -> bytes:
    """All that the server says to these bytes, of which each is sent when the last was answered."""
    url = client.base_url
    with socket.create_connection((url.host, url.port), timeout=30) as opened:
        got = b""
        for number, piece in enumerate(pieces):
            got += opened.recv(4096) if number else b""
            opened.sendall(piece)
        while data := opened.recv(4096):
            got += data
    return got


def head(*lines: str, length: int | None = len(BODY), version: str = "1.1") -> bytes:
    """The head of a request to answer a chat."""
    sized = [] if length is None else [f"Content-Length: {length}"]
    host = ["Host: localhost", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([f"POST {CHAT} HTTP/{version}", *host, *sized, *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{CHAT}/"),
        ("POST", "//v1//chat/completions"),
        ("POST", "/v1/v1/chat/completions"),
        ("POST", "/chat/completions"),
        ("GET", f"{MODELS}/"),
        ("GET", "/models"),
        ("GET", "/models/tiny/"),
        ("GET", "/health/"),
    ],
)
def test_an_address_that_was_joined_wrongly_is_understood(
    client: httpx.Client, method: str, path: str
) -> None:
    url = f"{str(client.base_url).rstrip('/')}{path}"
    asked = {"json": json.loads(BODY)} if method == "POST" else {}
    assert client.request(method, url, **asked).status_code == 200


def test_a_port_that_another_program_has_on_the_other_address_is_left_to_it() -> None:
    if not has_ipv6():
        pytest.skip("this machine has one address of localhost")
    for _ in range(TRIES):
        (other,) = listen("::1", 0)
        with other, suppress(DeviceError):
            (own,) = listen("127.0.0.1", other.getsockname()[1])
            own.close()
            return
    raise AssertionError("every port of the one address was taken on the other")


def has_ipv6() -> bool:
    """Tells whether this machine has the address ::1."""
    try:
        listen("::1", 0)[0].close()
    except DeviceError:
        return False
    return True


def test_two_lengths_are_refused(client: httpx.Client) -> None:
    """A proxy may believe the other one."""
    smuggled = head("Content-Length: 3") + BODY
    assert b" 400 " in said(client, smuggled).splitlines()[0]


@pytest.mark.parametrize(
    "name",
    ["localhost.", "LocalHost:8080", "app.localhost:80", "127.0.0.2", "10.0.2.2:8080", "[::1]:1"],
)
def test_names_that_no_other_site_can_have_are_answered(client: httpx.Client, name: str) -> None:
    assert client.get(MODELS, headers={"Host": name}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        *("host.docker.internal:8080", "localhost.localdomain", "xlocalhost", "localhost.evil.com"),
        *("127.0.0.1.nip.io", "127.0.0.1@evil.com", "[evil.com]", "[::1", "localhost:80:80", ":80"),
        *("evil.com#localhost", "2130706433", "evil.example:8080", ""),
    ],
)
def test_other_names_are_not_and_the_way_out_is_told(client: httpx.Client, name: str) -> None:
    refused = client.get(MODELS, headers={"Host": name})
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert repr(name) in error["message"] and "--allow-host" in error["message"]


def test_a_host_that_was_named_is_answered_and_no_other(serve: Serve) -> None:
    client = serve(allowed_hosts=("Host.Docker.Internal.", "devbox"))
    for name in ("host.docker.internal", "HOST.docker.internal:8080", "devbox.:1", "localhost"):
        assert client.get(MODELS, headers={"Host": name}).status_code == 200
    for name in ("docker.internal", "host.docker.internal.evil.com", "evil.com"):
        assert client.get(MODELS, headers={"Host": name}).status_code == 403


@pytest.mark.parametrize("header", ["Authorization", "api-key", "X-API-Key"])
def test_a_key_is_taken_where_clients_of_other_services_send_it(serve: Serve, header: str) -> None:
    client = serve(api_key="secret")
    form = "Bearer {}" if header == "Authorization" else "{}"
    assert client.get(MODELS, headers={header: form.format("secret")}).status_code == 200
    assert client.get(MODELS, headers={header: form.format("secre")}).status_code == 401
    assert client.get(f"{MODELS}?api_key=secret").status_code == 401  # addresses are logged


ORIGINS = [
    ("app://obsidian.md", "app://obsidian.md", True),
    ("app://obsidian.md", "app://obsidian.md.evil", False),
    ("app://obsidian.md", "app://obsidianxmd", False),
    ("capacitor://localhost", "capacitor://localhost", True),
    ("tauri://localhost", "http://localhost", False),
    ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh", True),
    ("chrome-extension://abcdefgh", "chrome-extension://other", False),
    ("moz-extension://*", "moz-extension://0c5a-11", True),
    ("moz-extension://*", "https://moz-extension", False),
    ("vscode-webview://*", "vscode-webview://0m3k", True),
    ("file://", "file://", True),
    ("file://", "null", False),
    ("http://localhost:*", "http://localhost:5173", True),
    ("http://localhost:*", "http://localhost", True),
    ("http://localhost:*", "http://localhost:5173.evil.com", False),
    ("http://localhost:*", "https://localhost:5173", False),
    ("HTTPS://A.Example", "https://a.example", True),
    ("http://[::1]:3000", "http://[::1]:3000", True),
]


@pytest.mark.parametrize(("named", "origin", "allowed"), ORIGINS)
def test_an_origin_that_was_named_may_ask(
    serve: Serve, named: str, origin: str, allowed: bool
) -> None:
    client = serve(cors_origins=("https://first.example", named))
    asked = client.options(
        CHAT,
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        },
    )
    told = origin if allowed else None
    assert asked.headers.get("access-control-allow-origin") == told
    assert asked.status_code == (200 if allowed else 400)
    if allowed:
        assert asked.headers["access-control-allow-private-network"] == "true"
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    answer = client.post(CHAT, content=BODY, headers={"Origin": origin, **JSON})
    assert answer.headers.get("access-control-allow-origin") == told


def test_a_stream_without_news_is_kept_alive(
    serve: Serve, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the gate opens there is nothing to tell, however long that takes."""
    monkeypatch.setattr("edge_spec.apps.server.answer.QUIET_S", 0.01)
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    with serve(parallel=1).stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        lines = answer.iter_lines()
        assert next(lines).startswith(":") and next(lines) == ""
        gate.end()
        events = [line for line in lines if line and not line.startswith(":")]
    assert events[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in events)
