"""Who may ask: keys, hosts, origins, and what browsers are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from edge_spec.apps.server import ServerOptions
from edge_spec.cli.options import SamplingOptions
from edge_spec.errors import UsageError
from fixtures.server_requests import CHAT, client_of

Serve = Callable[..., httpx.Client]
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
GUARDED = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/edge-spec/info"),
    ("GET", "/edge-spec/plan"),
    ("GET", "/props"),
    ("POST", "/infill"),
    ("POST", "/tokenize"),
    ("GET", "/nowhere"),
    ("GET", "/static"),
    ("OPTIONS", CHAT),
]


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer wrong", "Bearer secre", "Basic secret", "secret"]
)
@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_without_the_key_nothing_is_told(
    keyed: httpx.Client, method: str, path: str, key: Any
) -> None:
    headers = {} if key is None else {"Authorization": key}
    refused = keyed.request(method, path, headers=headers)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "secret" not in refused.text


@pytest.fixture(scope="module")
def keyed(served_once: Any) -> Any:
    with (
        served_once.fork() as engine,
        client_of(engine, api_key="secret") as client,
    ):
        yield client


def test_the_key_opens_and_the_page_and_health_need_none(keyed: httpx.Client) -> None:
    asked = keyed.post(CHAT, json=BODY, headers={"Authorization": "Bearer secret"})
    assert asked.status_code == 200
    assert keyed.get("/health").status_code == 200
    assert keyed.get("/").status_code != 401
    assert keyed.get("/static/none.js").status_code == 404


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_what_a_form_can_send_is_refused(serve: Serve, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    refused = serve().post(CHAT, content=b"{}", headers=headers)
    assert refused.status_code == 415
    assert "application/json" in refused.json()["error"]["message"]


def test_a_site_that_was_named_needs_the_key_too(serve: Serve) -> None:
    client = serve(cors_origins=("https://a.example",), api_key="secret")
    refused = client.post(CHAT, json=BODY, headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("path", ["/", "/health", "/nowhere", "/static/none.js"])
def test_browsers_are_told_to_be_strict(serve: Serve, path: str) -> None:
    headers = serve().get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers


def test_media_types_are_those_that_browsers_insist_on(serve: Serve) -> None:
    client = serve()
    for name, kind in (("main.js", "text/javascript"), ("page.css", "text/css")):
        headers = client.get(f"/static/{name}").headers
        assert headers["content-type"].startswith(kind)  # a module of another type is refused
        assert headers["cache-control"] == "no-cache"


def test_no_documentation_loads_scripts_from_elsewhere(serve: Serve) -> None:
    client = serve()
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    for key in (None, ""):
        with pytest.raises(UsageError, match="--api-key"):
            ServerOptions(host=host, api_key=key)
    assert not ServerOptions(host=host, api_key="secret").is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerOptions(host=host).is_loopback


@pytest.mark.parametrize(
    "bad",
    [
        {"port": -1},
        {"port": 65536},
        {"parallel": 0},
        {"queue": -1},
        {"queue_timeout_s": 0},
        {"request_timeout_s": -1},
        {"client_timeout_s": 0},
        {"grace_s": -1},
        {"max_body_bytes": 0},
        {"queue_timeout_s": float("nan")},
        {"grace_s": float("nan")},
        {"grace_s": float("inf")},
        {"sampling": 3},
        {"api_key": "schlüssel"},
        {"cors_origins": ("*",)},
        {"cors_origins": ("null",)},
        {"cors_origins": ("https://a.example/",)},
    ],
)
def test_options_out_of_their_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerOptions(**bad)


@pytest.mark.parametrize(
    "bad",
    [{"max_tokens": 0}, {"max_tokens": "5"}, {"temperature": -1.0}, {"reasoning": "on"}],
)
def test_sampling_out_of_its_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingOptions(**bad)


def test_the_key_is_not_shown_with_the_options() -> None:
    assert "secret" not in repr(ServerOptions(api_key="secret"))
    with pytest.raises(UsageError) as caught:
        ServerOptions(api_key=b"secret")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
