"""Requests made at random from the server's own OpenAPI description, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    status_code_conformance,
)

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.cli.options import SamplingOptions

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
]
LONGEST = 8  # tokens of an answer


@pytest.fixture(scope="module")
def described(served_once: Engine) -> Iterator[Any]:
    options = ServerOptions(port=0, parallel=1, sampling=SamplingOptions(LONGEST))
    with served_once.fork() as engine, RunningServer(engine, options) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


ASKED = [
    ("post", "/v1/chat/completions", 60),
    ("post", "/v1/completions", 60),
    ("post", "/v1/responses", 60),
    ("post", "/v1/responses/input_tokens", 10),  # the same fields
    ("post", "/v1/messages", 60),
    ("post", "/v1/messages/count_tokens", 10),
    ("post", "/api/chat", 30),
    ("post", "/api/generate", 30),
    ("post", "/api/show", 5),
    ("post", "/infill", 20),
    ("post", "/v1/fim/completions", 10),
    ("post", "/tokenize", 20),
    ("post", "/detokenize", 10),
    ("post", "/apply-template", 10),
]
TOLD = [
    "/v1/models",
    "/v1/models/{model}",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/health",
    "/metrics",
    "/edge-spec/info",
    "/edge-spec/plan",
    "/props",
]
CASES = [
    (method, path, mode, examples) for method, path, examples in ASKED for mode in GenerationMode
]
CASES += [("get", path, GenerationMode.POSITIVE, 2) for path in TOLD]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode", "examples"), CASES)
def test_no_request_breaks_the_server_or_its_description(
    described: Any, method: str, path: str, mode: GenerationMode, examples: int
) -> None:
    operation = described[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        shorten(case.body)
        case.validate_response(case.call(), checks=CHECKS)

    check()


def shorten(body: Any) -> None:
    """Most requests would end at their model's name, or take long."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > LONGEST:
            body[name] = LONGEST


def test_the_description_has_all_endpoints(described: Any) -> None:
    operations = {operation.ok().label for operation in described.get_all_operations()}
    assert operations == {f"{method.upper()} {path}" for method, path, *_ in CASES}
