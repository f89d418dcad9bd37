"""Agents that speak OpenAI's Responses API: a model that answers with what the last item says, so
that a tool's output decides on the next call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.text.chat_format import ChatFormat
from fixtures.echo_model import EOS, open_echo

# Knows tools and thoughts; what ends with <eos> last is what the model answers with.
TEMPLATE = """\
{% if tools %}s:{{ tools | tojson }}<eos>{% endif %}
{%- for message in messages %}
    {{- message.role[0] + ':' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' }}
        {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'a:' }}{% endif %}"""
TURNS = 20
TOOL = {
    "type": "function",
    "name": "step",
    "description": "Goes on.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def step(n: int) -> str:
    """What the model is to write in turn n."""
    return f"<think>\nturn {n}\n</think>\n\n" + (call("step", n=n) if n < TURNS else "All done.")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    parts = open_echo().parts
    text = ChatFormat(parts.text.tokenizer, TEMPLATE, eos_ids=(EOS,), bos_id=None)
    with (
        Engine(replace(parts, text=text)) as engine,
        RunningServer(engine, ServerOptions(port=0, parallel=2)) as running,
    ):
        yield f"{running.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("drafter", ["none", "suffix"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_of_twenty_calls(client: openai.OpenAI, streams: bool, drafter: str) -> None:
    history: list[Any] = [{"role": "user", "content": step(0)}]
    asked: dict[str, Any] = {
        "model": "echo",
        "instructions": "Go on.",
        "tools": [TOOL],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "extra_body": {"speculative": {"drafter": drafter}},
    }
    for n in range(TURNS):
        if streams:
            with client.responses.stream(input=history, **asked) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=history, **asked)
        thought, made = response.output
        assert thought.content[0].text == f"turn {n}"
        assert (made.name, json.loads(made.arguments)) == ("step", {"n": n})
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert (response.usage.input_tokens_details.cached_tokens > 0) or n == 0
        history += [item.to_dict() for item in response.output]
        output = {"type": "function_call_output", "call_id": made.call_id, "output": step(n + 1)}
        history.append(output)
    response = client.responses.create(input=history, **asked)
    assert response.output_text == "All done."
    assert response.output[0].content[0].text == f"turn {TURNS}"


@pytest.mark.parametrize("summary", [None, "auto"])
def test_a_thought_is_told_where_the_client_looks_for_it(
    client: openai.OpenAI, summary: Any
) -> None:
    asked: dict[str, Any] = {"model": "echo", "input": "<think>\nso\n</think>\n\nyes"}
    response = client.responses.create(**asked, reasoning={"summary": summary})
    thought, message = response.output
    assert message.content[0].text == "yes"
    assert [part.text for part in thought.content] == ["so"]
    events = client.responses.create(**asked, reasoning={"summary": summary}, stream=True)
    assert "response.reasoning_text.delta" in [event.type for event in events]


def test_a_request_of_codex(url: str) -> None:
    """Fields and items as that program sends them, with a thought that it has kept sealed."""
    turn: dict[str, Any] = {
        "model": "echo",
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "<environment_context/>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": step(0)}],
            },
        ],
        "tools": [
            TOOL | {"strict": False},
            {"type": "namespace", "name": "agents", "tools": [TOOL | {"name": "spawn"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-thread",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    with httpx.Client(timeout=30) as client:
        for n in range(3):
            lines = client.post(f"{url}/responses", json=turn).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
            done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            thought, made = done
            assert thought["content"][0]["text"] == f"turn {n}"
            kept = {name: thought[name] for name in ("type", "summary", "encrypted_content")}
            sent = {name: made[name] for name in ("type", "name", "arguments", "call_id")}
            output = {"type": "function_call_output", "call_id": made["call_id"]}
            turn["input"] += [kept | {"content": None}, sent, output | {"output": step(n + 1)}]
            assert events[-1]["type"] == "response.completed"
            assert events[-1]["response"]["tools"] == turn["tools"][:2]
        turn["input"].append({"role": "user", "content": call("agents__spawn", n=1)})
        (made,) = client.post(f"{url}/responses", json={**turn, "stream": False}).json()["output"]
        assert (made["namespace"], made["name"]) == ("agents", "spawn")


@pytest.mark.slow  # its import takes seconds
def test_the_agents_of_openai(url: str) -> None:
    """Function tools, streamed runs, and an agent that hands off to another."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked: list[int] = []

    @agents.function_tool(name_override="step")
    def take_step(n: int) -> str:
        """Goes on."""
        asked.append(n)
        return step(n + 1)

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        model = agents.OpenAIResponsesModel(model="echo", openai_client=client)
        other = agents.Agent(name="other", instructions="Answer.", model=model)
        agent = agents.Agent(
            name="agent", instructions="Go on.", model=model, tools=[take_step], handoffs=[other]
        )
        result = await agents.Runner.run(agent, step(0), max_turns=TURNS + 1)
        assert (result.final_output, asked) == ("All done.", list(range(TURNS)))
        asked.clear()
        streamed = agents.Runner.run_streamed(agent, step(0), max_turns=TURNS + 1)
        names = [
            e.name async for e in streamed.stream_events() if e.type == "run_item_stream_event"
        ]
        assert (streamed.final_output, asked) == ("All done.", list(range(TURNS)))
        assert names.count("tool_called") == names.count("tool_output") == TURNS
        assert names.count("reasoning_item_created") == TURNS + 1
        result = await agents.Runner.run(agent, call("transfer_to_other"))
        assert result.last_agent is other
        assert json.loads(result.final_output) == {"assistant": "other"}
        await client.close()

    asyncio.run(run())
