"""What clients send around a request: methods, paths, headers, hosts, origins; and how a stream is
kept alive."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.apps.server.running import LimitedConnection, listen
from edge_spec.errors import DeviceError, UsageError
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


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_its_body(client: httpx.Client, path: str) -> None:
    got, asked = client.get(path), client.head(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"") == (200, b"")
    assert asked.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # it counts these two
        assert asked.headers["content-length"] == str(len(got.content))
    assert client.head(path).status_code == 200  # on the same connection


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("HEAD", CHAT, 405, "POST, OPTIONS"),
        ("GET", CHAT, 405, "POST, OPTIONS"),
        ("PUT", COMPLETIONS, 405, "POST, OPTIONS"),
        ("DELETE", MODELS, 405, "GET, HEAD, OPTIONS"),
        ("FETCH", "/health", 405, "GET, HEAD, OPTIONS"),
        ("OPTIONS", CHAT, 204, "POST, OPTIONS"),
        ("OPTIONS", "/v1/models/tiny", 204, "GET, HEAD, OPTIONS"),
        ("OPTIONS", "/v1/nothing", 404, None),
        ("HEAD", "/v1/nothing", 404, None),
    ],
)
def test_what_a_path_takes_is_told(
    client: httpx.Client, method: str, path: str, status: int, allowed: str | None
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
    if answer.content:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and path in error["message"]


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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/api/v1/chat/completions", f"Send it to {CHAT}."),
        ("/openai/v1/models", f"Send it to {MODELS}."),
        ("/openai/deployments/tiny/chat/completions", f"Send it to {CHAT}."),
        ("/v1/embeddings", "GET /openapi.json"),
        ("/api/pull", "GET /openapi.json"),
        ("/" + "x" * 5000, "GET /openapi.json"),
    ],
)
def test_an_unknown_path_is_told_which_one_is_meant(
    client: httpx.Client, path: str, hint: str
) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert hint in message and len(message) < 300


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": 'Application/JSON;charset="UTF-8"'},
        {"Content-Type": "application/json;charset=utf8;version=1"},
        {"Content-Encoding": "identity"},
        {"Accept": "text/event-stream", "Accept-Encoding": "gzip, br"},
        {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
    ],
)
def test_usual_headers_change_nothing(client: httpx.Client, headers: dict[str, str]) -> None:
    given = JSON | headers
    assert client.post(CHAT, content=BODY, headers=given).status_code == 200
    pieces = client.post(CHAT, content=iter([BODY[:9], BODY[9:]]), headers=given)  # chunked
    assert pieces.status_code == 200


@pytest.mark.parametrize("headers", [{"Content-Encoding": "gzip"}, {}])
def test_a_packed_body_is_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    refused = client.post(CHAT, content=gzip.compress(BODY), headers=JSON | headers)
    assert refused.status_code == 400
    assert client.get("/health").status_code == 200  # on the same connection


def test_a_body_may_begin_with_a_mark_of_its_encoding(client: httpx.Client) -> None:
    assert client.post(CHAT, content=b"\xef\xbb\xbf" + BODY, headers=JSON).status_code == 200


def test_a_client_that_waits_for_leave_to_send_gets_it(client: httpx.Client) -> None:
    got = said(client, head("Expect: 100-continue"), BODY)
    assert got.startswith(b"HTTP/1.1 100") and b" 200 OK" in got


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_both_addresses_of_localhost_are_listened_to(served: Engine, host: str) -> None:
    """Some clients know but one of them."""
    has_both = has_ipv6()

    def is_reached_by_both() -> bool:
        with RunningServer(served, ServerOptions(port=0, host=host)) as running:
            assert httpx.get(f"http://127.0.0.1:{running.port}/health").status_code == 200
            with suppress(httpx.ConnectError):
                return httpx.get(f"http://[::1]:{running.port}/health").status_code == 200
        return False

    assert any(is_reached_by_both() for _ in range(TRIES)) == has_both


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


def test_a_kept_connection_outlives_those_that_clients_keep(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp drops its own after 15 s, Python's requests and Go after a minute or more."""
    asked: list[float] = []
    kept = LimitedConnection.on_response_complete

    def told(connection: LimitedConnection) -> None:
        kept(connection)
        timer = connection.timeout_keep_alive_task
        assert timer is not None
        asked.append(timer.when() - connection.loop.time())

    monkeypatch.setattr(LimitedConnection, "on_response_complete", told)
    with RunningServer(served, ServerOptions(port=0)) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
    assert asked and asked[0] > 60


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


@pytest.mark.parametrize(
    "name", ["", "*", "*.example.com", "http://a.example", "a.example:80", "a/b", "a b", "a..b"]
)
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name of a host"):
        ServerOptions(allowed_hosts=(name,))


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
    ("HTTPS://A.Example:443", "https://a.example", True),
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


@pytest.mark.parametrize(
    "origin",
    [
        *("*", "null", "https://*", "http://*:80", "https://a.example/", "a.example"),
        *(
            "localhost:1",
            "https://user@a.example",
            "https://a.example#x",
            "file:///home",
            "app://",
            "app://*.md",
        ),
        *("https://a.example:port", "javascript:alert(1)", ""),
    ],
)
def test_what_is_no_origin_is_refused_with_the_way_to_write_one(origin: str) -> None:
    with pytest.raises(UsageError, match=r"origin.*(app://obsidian\.md|http://localhost:8000)"):
        ServerOptions(cors_origins=(origin,))


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
