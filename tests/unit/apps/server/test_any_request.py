"""Whatever a body has: it is read, or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edge_spec.apps.server.anthropic.parse import MessagesRequest
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.fields import Body, refused_body
from edge_spec.apps.server.llamacpp import InfillRequest
from edge_spec.apps.server.messages import for_template
from edge_spec.apps.server.ollama import OllamaChatRequest, OllamaGenerateRequest
from edge_spec.apps.server.responses.parse import ResponsesRequest
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest

MOST_CHARACTERS = 600  # of a refusal: it shows a value, and tells what to send instead
KINDS = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": [{"role": "user", "content": "a"}]},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    OllamaChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    OllamaGenerateRequest: {"prompt": "a"},
    InfillRequest: {"input_prefix": "a"},
}


def names_of(kind: type[Body]) -> set[str]:
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    return fields | {*kind.also, *kind.off, *kind.harmless}


def kinds() -> list[type[Body]]:
    found = [Body]
    for kind in found:
        found += kind.__subclasses__()
    return found


INNER = sorted(set().union(*map(names_of, kinds())))
TEXTS = st.sampled_from(["text", "user", "assistant", "function", "json_schema", "none", ""])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats()
    | TEXTS
    | st.text(st.characters(codec=None), max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=400)
def test_any_body_is_read_or_refused_in_one_line(kind: type[Body], data: Any) -> None:
    names = st.sampled_from(sorted(names_of(kind))) | st.text(max_size=8)
    body = {**KINDS[kind], **data.draw(st.dictionaries(names, VALUES, max_size=3))}
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        told = refused_body({**first, "loc": ("body", *first["loc"])}, body)
        assert "\n" not in told.message
        assert told.message.endswith((".", "?"))
        assert len(told.message) < MOST_CHARACTERS
        options = body.get("options")
        members = {*body, *(options if isinstance(options, dict) else ())}
        assert json.loads(told.body("/"))["error"]["param"] is None or told.param in members
        return
    try:
        if isinstance(request, MessagesRequest):
            request = request.for_chat()
        elif isinstance(request, OllamaChatRequest):
            request = request.continued() or request
    except ApiError as error:
        assert error.status == 400
        return
    assert request.form is None or request.form.grammar  # type: ignore[attr-defined]
    assert request.limit is None or request.limit >= -1  # type: ignore[attr-defined]
    if isinstance(request, ChatRequest):
        json.dumps([for_template(message) for message in request.messages])
        json.dumps(request.template_kwargs)
