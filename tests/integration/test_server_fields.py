"""Members of requests, by our names and by those of other servers, do what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server.messages import Message, for_template
from fixtures.server_requests import (
    BOTH,
    CHAT,
    COMPLETIONS,
    HELLO,
    client_of,
    events,
    post,
    refusal,
    text,
)

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 12.0},
        {"max_tokens": None, "max_completion_tokens": 12},
        {"max_tokens": None, "n_predict": 12},
        {"max_tokens": 99, "max_completion_tokens": 12},
        {"n_predict": 12, "num_predict": 12},
        {"model": ""},
        {"top_k": -1},
        {"top_k": 0.0, "typical_p": 1, "tfs": 1.0, "mirostat": 0, "mirostat_tau": 5},
        {"dry_multiplier": 0, "dry_base": 1.75, "xtc_probability": 0.0, "min_tokens": 0},
        {"seed": -1},
        {"stop": [""]},
        {"stop": ""},
        {"stop": [], "stop_token_ids": []},
        {"stop": [f"<{number}>" for number in range(100)]},
        {"frequency_penalty": 0, "repeat_penalty": 1, "repeat_last_n": 64},
        {"logit_bias": {}, "ignore_eos": False, "n": 1.0},
        {"grammar": "", "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"cache_prompt": True, "id_slot": -1, "keep_alive": "5m", "priority": 0},
        {"safety_identifier": "a", "prompt_cache_key": "b", "timings_per_token": True},
        {"stream_options": {"include_obfuscation": False}, "stream": False},
        {"anything": None, "logprobs": False, "suffix": None},
    ],
    ids=json.dumps,
)
@BOTH
def test_a_field_that_asks_for_nothing_changes_nothing(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert text(client, path, **body) == text(client, path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3.0}, {"max_tokens": 3}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"rep_pen": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"stop_sequences": ["a"]}, {"stop": "a"}),
        ({"temp": 1, "random_seed": 7}, {"temperature": 1, "seed": 7}),
        ({"guided_json": AGE}, {"json_schema": AGE}),
        ({"guided_json": json.dumps(AGE)}, {"json_schema": AGE}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {}}),
        ({"response_format": {"type": "json_object", "schema": AGE}}, {"json_schema": AGE}),
        ({"response_format": {"type": "json_schema", "schema": AGE}}, {"json_schema": AGE}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": AGE}}},
            {"json_schema": AGE},
        ),
        ({"guided_grammar": 'root ::= "x" [a-z]+'}, {"grammar": 'root ::= "x" [a-z]+'}),
        ({"guided_regex": "x[a-z]+"}, {"grammar": 'root ::= "x" [a-z]+'}),
        ({"grammar": "start: /x[a-z]+/"}, {"grammar": 'root ::= "x" [a-z]+'}),
    ],
    ids=json.dumps,
)
@BOTH
def test_other_names_mean_the_same(
    client: httpx.Client, path: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    given = {} if "max_tokens" in other else {"max_tokens": 30}
    if not given:
        one = {"max_tokens": None, **one}
    assert text(client, path, **given, **one) == text(client, path, **given, **other)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"json_schema": AGE}, r'\{"age": [1-9][0-9]\}'),
        ({"guided_choice": ['say "no"', "yes"]}, r'say "no"|yes'),
        ({"regex": "[ab]{4}"}, "[ab]{4}"),
        ({"grammar": 'root ::= pair{2}\npair ::= [0-9] "," # two\n'}, "([0-9],){2}"),
    ],
)
@BOTH
def test_an_answer_has_the_form_that_is_asked_for(
    client: httpx.Client, path: str, form: dict[str, Any], fits: str
) -> None:
    assert re.fullmatch(fits, text(client, path, max_tokens=60, **form))


@BOTH
def test_a_choice_may_be_any_text(client: httpx.Client, path: str) -> None:
    choices = ['"', "\\", "\n", "ü/|*", "%json"]
    assert text(client, path, max_tokens=60, guided_choice=choices) in choices


@BOTH
def test_minus_one_token_is_the_whole_context(served_once: Engine, path: str) -> None:
    with (
        served_once.fork() as engine,
        client_of(engine, max_tokens=5) as client,
    ):
        letters = "a" * 900  # a token each: few are left to write
        message = {"role": "user", "content": letters}
        prompt = {"messages": [message]} if path == CHAT else {"prompt": letters}
        usages = [
            post(client, path, **prompt, max_tokens=limit, ignore_eos=True).json()["usage"]
            for limit in (None, -1, -2)
        ]
    assert usages[0]["completion_tokens"] == 5
    for usage in usages[1:]:
        assert usage["total_tokens"] >= engine.context_length


@BOTH
def test_an_end_that_is_ignored_does_not_come(client: httpx.Client, path: str) -> None:
    end = {"logit_bias": {"264": 100}}
    assert text(client, path, **end) == ""
    assert len(text(client, path, ignore_eos=True, **end)) > 0
    assert "form" in refusal(post(client, path, ignore_eos=True, regex="a"))


@BOTH
def test_the_text_ends_before_a_stop_token(
    client: httpx.Client, served_once: Engine, path: str
) -> None:
    ids = [token["id"] for token in tokens_of(client, path)]
    stop = next(place for place in range(3, len(ids)) if ids[place] not in ids[:place])
    (choice,) = post(client, path, stop_token_ids=[ids[stop]]).json()["choices"]
    told = choice["message"]["content"] if path == CHAT else choice["text"]
    assert told == served_once.parts.text.tokenizer.decode(ids[:stop])
    assert choice["finish_reason"] == "stop"
    assert "stop_token_ids" in refusal(post(client, path, stop_token_ids=[9999]))


def tokens_of(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    document = post(client, path, **{"speculative": {"tokens": True}, **body}).json()
    told: list[dict[str, Any]] = document["edge_spec"]["tokens"]
    return told


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_a_frequency_penalty_keeps_tokens_from_coming_again(
    client: httpx.Client, drafter: str
) -> None:
    body: dict[str, Any] = {"logit_bias": {"65": 100, "66": 100, "67": 100}, "max_tokens": 24}

    def most(penalty: float) -> int:
        told = tokens_of(
            client,
            COMPLETIONS,
            frequency_penalty=penalty,
            speculative={"drafter": drafter, "tokens": True},
            **body,
        )
        return max(Counter(token["id"] for token in told).values())

    assert most(2) < most(0)
    assert most(2) <= 24 // 3 + 2  # each about as often as the others


def test_a_prompt_is_echoed(client: httpx.Client) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3}
    plain = post(client, COMPLETIONS, **body).json()["choices"]
    echoed = post(client, COMPLETIONS, **body, echo=True).json()["choices"]
    prompts = ["ab", "ab", "cd", "cd"]
    told = [prompt + choice["text"] for prompt, choice in zip(prompts, plain, strict=True)]
    assert [choice["text"] for choice in echoed] == told
    texts = [""] * 4
    for event in events(client, COMPLETIONS, **body, echo=True):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == told


@BOTH
def test_n_probs_asks_for_scores(client: httpx.Client, path: str) -> None:
    scored = post(client, path, n_probs=2).json()["choices"][0]["logprobs"]
    tops = (
        [e["top_logprobs"] for e in scored["content"]] if path == CHAT else scored["top_logprobs"]
    )
    assert {len(top) for top in tops} == {2}
    assert post(client, path, n_probs=0).json()["choices"][0]["logprobs"] is None


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({"content": []}, {"content": ""}),
        ({"content": None, "function_call": None, "audio": None}, {"content": ""}),
        ({"content": "a", "id": 5, "opts": {"visible": True}}, {"content": "a"}),
        ({"content": [{"type": "output_text", "text": "a"}]}, {"content": "a"}),
        (
            {"content": "", "tool_calls": [{**CALL, "index": 0}]},
            {"content": "", "tool_calls": [CALL]},
        ),
        (
            {"content": "", "tool_calls": [{**CALL, "function": {"name": "f"}}]},
            {"content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]},
        ),
        (
            {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]},
            {"content": None, "tool_calls": [CALL]},
        ),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_messages_that_clients_replay_are_taken(
    client: httpx.Client, role: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    told = [
        text(client, CHAT, messages=[*HELLO, {"role": role, **given}, *HELLO])
        for given in (one, other)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("any", "required"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    ],
    ids=str,
)
def test_a_choice_of_tools_has_several_forms(client: httpx.Client, one: Any, other: Any) -> None:
    tools = [{"name": "f", "parameters": AGE}, {"type": "function", "function": {"name": "g"}}]
    answers = [
        post(client, CHAT, tools=tools, tool_choice=choice, max_tokens=60).json()["choices"][0]
        for choice in (one, other)
    ]
    calls = [
        [call["function"] for call in answer["message"].get("tool_calls", ())] for answer in answers
    ]
    assert calls[0] == calls[1]
    assert bool(calls[0]) == (other != "none")


def test_thoughts_go_to_the_template() -> None:
    message = Message.model_validate({"role": "assistant", "content": None, "reasoning": "hm"})
    assert for_template(message) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
    }
