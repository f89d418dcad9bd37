"""What the server answers through every API, whole and streamed, and what it refuses.

The model answers each message with its own text (fixtures/echo_model.py), so a request says what is
written. Values that differ between two runs of one server are masked by the names of their keys.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from fixtures.echo_model import THINKING_TEMPLATE, byte_tokenizer, open_echo
from fixtures.infill_models import QWEN
from fixtures.server_requests import client_of

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MASK = "<masked>"
MASKED = {
    *("id", "created", "created_at", "completed_at", "modified_at", "call_id", "tool_call_id"),
    *("item_id", "tool_use_id", "system_fingerprint", "timings", "digest", "size", "version"),
    *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "build_info"),
    *("signature", "encrypted_content", "expires_at", "request_id", "obfuscation"),
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "description": "A function.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TWO_CALLS = CALL + "\n" + CALL.replace("1", "2")
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ],
}
THOUGHT = "<think>\nso it is\n</think>\n\nyes"

Request = tuple[str, Any]  # path and body; None: GET


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 200, **more}


def both(name: str, path: str, body: dict[str, Any]) -> dict[str, Request]:
    """Return the exchange, whole and streamed."""
    return {
        name: (path, {**body, "stream": False}),
        f"{name}, streamed": (path, {**body, "stream": True}),
    }


def _chat() -> dict[str, Request]:
    results = [*said("call")["messages"], CALLED]
    results += [{"role": "tool", "tool_call_id": "c1", "content": "four"}]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        **both("chat", CHAT, said("Hello, é!")),
        "chat, streamed with usage": (CHAT, said("hey", **usage)),
        **both("chat, cut", CHAT, said("hello", max_tokens=3)),
        **both("chat, stopped", CHAT, said("hello there", stop=[" t"])),
        **both("chat, scored", CHAT, said("hey", logprobs=True, top_logprobs=2)),
        **both("chat, two choices", CHAT, said("hi", n=2, seed=3)),
        **both("chat, schema", CHAT, said('{"a": 12}', response_format=JSON_FORMAT)),
        **both("chat, tool call", CHAT, said(CALL, tools=[TOOL])),
        **both("chat, two calls", CHAT, said(TWO_CALLS, tools=[TOOL], parallel_tool_calls=True)),
        **both("chat, required call", CHAT, said(CALL, tools=[TOOL], tool_choice="required")),
        "chat, no call": (CHAT, said("hello", tools=[TOOL], tool_choice="none")),
        "chat, tool result": (CHAT, {"messages": results, "tools": [TOOL], "max_tokens": 80}),
        "chat, empty answer": (CHAT, said("")),
        "chat, no messages": (CHAT, {"messages": []}),
        "chat, unknown model": (CHAT, said("hello", model="nobody")),
        "chat, unknown field": (CHAT, said("hello", nonsense=1)),
        "chat, wrong type": (CHAT, said("hello", temperature="hot")),
        "chat, out of range": (CHAT, said("hello", max_tokens=0)),
        "chat, unknown role": (CHAT, {"messages": [{"role": "king", "content": "a"}]}),
        "chat, malformed": (CHAT, b'{"messages": ['),
        "chat, a list": (CHAT, []),
        "chat, too long": (CHAT, said("a" * 3000)),
        "chat, a bad schema": (
            CHAT,
            said("a", response_format={"type": "json_schema", "json_schema": {"schema": 3}}),
        ),
        "chat, a choice without tools": (CHAT, said("hello", tool_choice="required")),
        "chat, the wrong method": (CHAT, None),
        "nothing there": ("/v1/nothing", {}),
    }


def _completions() -> dict[str, Request]:
    drawn = {"prompt": "x", "max_tokens": 12, "temperature": 1.0}
    return {
        **both("completion", COMPLETIONS, {"prompt": "abc", "max_tokens": 6}),
        **both("completion, stopped", COMPLETIONS, {"prompt": "a", "stop": "ef"}),
        **both("completion, seed 1", COMPLETIONS, {**drawn, "seed": 1}),
        "completion, seed 2": (COMPLETIONS, {**drawn, "seed": 2}),
        "completion, top 2": (COMPLETIONS, {**drawn, "seed": 2, "top_k": 2}),
        "completion, biased": (COMPLETIONS, {**drawn, "seed": 2, "logit_bias": {"99": -100}}),
        **both("completion, scored", COMPLETIONS, {"prompt": "a", "max_tokens": 3, "logprobs": 2}),
        "completion, tokens": (COMPLETIONS, {"prompt": [97, 98], "max_tokens": 3}),
        "completion, several": (COMPLETIONS, {"prompt": ["a", "m"], "max_tokens": 3}),
        "completion, echo": (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "echo": True}),
        "completion, no prompt": (COMPLETIONS, {"max_tokens": 3}),
        "completion, wrong prompt": (COMPLETIONS, {"prompt": {"a": 1}}),
        "completion, unknown token": (COMPLETIONS, {"prompt": [99999]}),
    }


def _responses() -> dict[str, Request]:
    tool = {"type": "function", **FUNCTION}
    format = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    items = [
        {"role": "user", "content": "call"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "four"},
    ]
    cut = {"input": "hello", "max_output_tokens": 3}
    return {
        **both("response", RESPONSES, {"input": "hey", "instructions": "Be brief."}),
        **both("response, cut", RESPONSES, cut),
        **both("response, tool call", RESPONSES, {"input": CALL, "tools": [tool]}),
        **both(
            "response, cut call",
            RESPONSES,
            {"input": CALL, "tools": [tool], "max_output_tokens": 45},
        ),
        **both("response, schema", RESPONSES, {"input": '{"a": 1}', "text": {"format": format}}),
        "response, tool result": (RESPONSES, {"input": items, "tools": [tool]}),
        "response, stored before": (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
        "response, no input": (RESPONSES, {}),
        "response, unknown model": (RESPONSES, {"input": "a", "model": "nobody"}),
        "response, too long": (RESPONSES, {"input": "a" * 3000}),
        "response, input tokens": (f"{RESPONSES}/input_tokens", {"input": "hello"}),
    }


def _anthropic() -> dict[str, Request]:
    tools = {"tools": [{"name": "f", "description": "A function.", "input_schema": SCHEMA}]}
    used = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "four"}
    turns = [
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    text = {key: said("hello")[key] for key in ("messages",)}
    return {
        **both("message", MESSAGES, said("hey", system="Be brief.")),
        **both("message, cut", MESSAGES, said("hello", max_tokens=3)),
        **both("message, stopped", MESSAGES, said("hello there", stop_sequences=[" t"])),
        **both("message, tool call", MESSAGES, said(CALL, **tools)),
        "message, tool result": (MESSAGES, {"messages": turns, "max_tokens": 80, **tools}),
        "message, no limit": (MESSAGES, text),
        "message, unknown field": (MESSAGES, said("a", nonsense=1)),
        "message, unknown model": (MESSAGES, said("a", model="nobody")),
        "message, too long": (MESSAGES, said("a" * 3000)),
        "message, malformed": (MESSAGES, b"{"),
        "count": (COUNT, text),
        "count with tools": (COUNT, {"messages": turns, **tools}),
        "count, malformed": (COUNT, {"messages": 3}),
    }


def _ollama() -> dict[str, Request]:
    def asked(text: str, **more: Any) -> dict[str, Any]:
        return {"model": "echo", "messages": said(text)["messages"], **more}

    few = {"options": {"num_predict": 3}}
    prompt = {"model": "echo", "prompt": "hey"}
    return {
        **both("ollama chat", "/api/chat", asked("hey")),
        **both("ollama chat, cut", "/api/chat", asked("hello", **few)),
        **both("ollama chat, tool call", "/api/chat", asked(CALL, tools=[TOOL])),
        "ollama chat, schema": ("/api/chat", asked('{"a": 1}', format=SCHEMA, stream=False)),
        "ollama chat, load": ("/api/chat", {"model": "echo"}),
        "ollama chat, unknown model": ("/api/chat", asked("a") | {"model": "nobody"}),
        "ollama chat, wrong format": ("/api/chat", asked("a", format="xml")),
        **both("ollama generate", "/api/generate", prompt),
        "ollama generate, raw": ("/api/generate", {**prompt, **few, "raw": True, "stream": False}),
        "ollama generate, wrong type": ("/api/generate", {"model": "echo", "prompt": 3}),
        "ollama tags": ("/api/tags", None),
        "ollama show": ("/api/show", {"model": "echo"}),
        "ollama show, unknown model": ("/api/show", {"model": "nobody"}),
        "ollama version": ("/api/version", None),
    }


def _others() -> dict[str, Request]:
    pieces = {"content": "hé!", "with_pieces": True}
    return {
        "tokenize": ("/tokenize", {"content": "hé!"}),
        "tokenize with pieces": ("/tokenize", pieces),
        "tokenize, wrong type": ("/tokenize", {"content": 3}),
        "detokenize": ("/detokenize", {"tokens": [104, 105, 256]}),
        "detokenize, unknown token": ("/detokenize", {"tokens": [99999]}),
        "apply template": ("/apply-template", said("hello")),
        "models": ("/v1/models", None),
        "model": ("/v1/models/echo", None),
        "model, unknown": ("/v1/models/nobody", None),
        "props": ("/props", None),
        "health": ("/health", None),
        "infill without its tokens": ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    }


def _thoughts() -> dict[str, Request]:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    ollama = {"model": "echo", "messages": said(THOUGHT)["messages"], "think": True}
    return {
        **both("thought in chat", CHAT, said(THOUGHT)),
        **both("thought in a message", MESSAGES, said(THOUGHT, **thinking)),
        **both("thought in a response", RESPONSES, {"input": THOUGHT}),
        **both("thought in ollama", "/api/chat", ollama),
        "thought, cut": (CHAT, said(THOUGHT, max_tokens=12, reasoning_budget=4)),
    }


def _infill() -> dict[str, Request]:
    around = {"input_prefix": "def ", "input_suffix": "()", "n_predict": 6}
    fim = {"prompt": "def ", "suffix": "()", "max_tokens": 6}
    return {
        **both("infill", "/infill", around),
        "infill, a file": ("/infill", {**around, "input_extra": [{"text": "x", "filename": "y"}]}),
        "infill, stopped": ("/infill", {**around, "stop": ["d"]}),
        "infill, nothing": ("/infill", {}),
        **both("fim", "/v1/fim/completions", fim),
        "fim, wrong type": ("/v1/fim/completions", {"prompt": "a", "suffix": 3}),
        "completion with a suffix": (COMPLETIONS, fim),
    }


def record() -> dict[str, Any]:
    """Return every exchange by its name: the request, and the reply with its status."""
    plain = _chat() | _completions() | _responses() | _anthropic() | _ollama() | _others()
    found: dict[str, Any] = {}
    with open_echo(context_length=2000) as engine, client_of(engine) as client:
        found |= {name: exchange(client, *request) for name, request in plain.items()}
    with (
        open_echo(template=THINKING_TEMPLATE, opening="{{ '<think>\\n' }}") as engine,
        client_of(engine) as client,
    ):
        found |= {name: exchange(client, *request) for name, request in _thoughts().items()}
    with open_echo(tokenizer=byte_tokenizer(added=QWEN)) as engine, client_of(engine) as client:
        found |= {name: exchange(client, *request) for name, request in _infill().items()}
    return found


def exchange(client: httpx.Client, path: str, body: Any) -> dict[str, Any]:
    """Ask, and return what was asked and answered."""
    if body is None:
        response = client.get(path)
    elif isinstance(body, bytes):
        headers = {"content-type": "application/json"}
        response = client.post(path, content=body, headers=headers)
    else:
        response = client.post(path, json=body)
    kind = response.headers.get("content-type", "")
    answer: Any = response.text
    if kind.startswith("application/json"):
        answer = masked(response.json())
    elif kind.startswith(("text/event-stream", "application/x-ndjson")):
        answer = [_masked_line(line) for line in response.text.split("\n")]
    return {
        "path": path,
        "request": body.decode() if isinstance(body, bytes) else _shortened(body),
        "status": response.status_code,
        "type": kind,
        "reply": answer,
    }


def _masked_line(line: str) -> str:
    prefix, data = ("data: ", line[6:]) if line.startswith("data: ") else ("", line)
    if not data.startswith("{"):
        return line
    return prefix + json.dumps(masked(json.loads(data)), ensure_ascii=False)


def masked(value: Any) -> Any:
    """Return the document with the values that no two runs share replaced. null stays, and so do
    ids of tokens, which are numbers; log probabilities are rounded, since processors differ in the
    last digits."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: MASK if _varies(name, each) else masked(each) for name, each in value.items()}
    return [masked(each) for each in value] if isinstance(value, list) else value


def _varies(name: str, value: Any) -> bool:
    is_token = name == "id" and isinstance(value, int)
    return name in MASKED and value is not None and not is_token


def _shortened(body: Any) -> Any:
    """Return the request with a long text by its length."""
    if isinstance(body, dict):
        return {name: _shortened(each) for name, each in body.items()}
    if isinstance(body, list):
        return [_shortened(each) for each in body]
    if isinstance(body, str) and len(body) > 1000:
        return f"<{len(body)} letters>"
    return body
