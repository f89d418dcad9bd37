"""The form of calls is found in what a template renders, and answers are held to what is read."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.grammar import Grammar, GrammarCompiler
from edge_spec.text.template_traits import TemplateTraits
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.tools.json_form import JsonForm
from fixtures import form_walks
from fixtures.call_templates import CALLS, tokenizer
from fixtures.read_calls import read

EOS = 258  # of the byte tokenizer
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "maxLength": 12},
                    "where": {"type": "object", "properties": {"page": {"type": "integer"}}},
                },
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {
    "look_up": TOOLS[0]["function"]["parameters"],
    "now": {"type": "object", "maxProperties": 0},
}
GIVEN = {"word": 'a "b" } ]\\ <c> \u00fc\n', "where": {"page": 3}}


@cache
def form_of(source: str) -> JsonForm:
    native = TemplateTraits(ChatTemplate(source).render).native_tools
    assert native is not None and isinstance(native.form, JsonForm)
    return native.form


@pytest.fixture(scope="module")
def codec(byte_tokenizer_json: str) -> Tokenizer:
    return tokenizer(byte_tokenizer_json)


@pytest.fixture(scope="module")
def compiler(codec: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(codec, max(codec.vocabulary().values()) + 1, (EOS,))


@pytest.mark.parametrize("source", CALLS.values(), ids=CALLS)
def test_calls_in_a_rendered_answer_are_those_that_were_given(source: str) -> None:
    form = form_of(source)
    calls = [
        {"id": form.ids.made(name, n), "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate([("look_up", GIVEN), ("now", {}), ("look_up", {})])
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt = ChatTemplate(source).render([message], add_generation_prompt=False)
    answer = prompt.removeprefix("<|assistant|>").removesuffix("<|end|>")
    for text in (answer, form.written(calls)):
        found = read(form, text, range(0, 400, 7), TOOLS)
        assert found.text == "" and not found.is_cut
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
            ("look_up", GIVEN),
            ("now", {}),
            ("look_up", {}),
        ]


@pytest.mark.parametrize("source", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "begun",
    [
        "",
        "marker",
        '{"name": "look_up", "arguments":',
        '```json\n[{"name":"now","parameters": ',
        'So:\n```\n{"name": "look_up" ,"arguments":',
    ],
)
def test_what_a_grammar_allows_is_read_as_calls_that_fit(
    source: str, begun: str, codec: Tokenizer, compiler: GrammarCompiler
) -> None:
    form = form_of(source)
    if begun == "marker":
        begun = "" if form.is_bare else form.marker
    if "name" in begun and not form.is_named:
        return
    grammar = form.grammar(TOOLS, required=not begun, several=True)
    num_calls = 0
    for seed in range(6):
        markup = walked(codec, compiler, grammar, seed, begun)
        if markup is None:
            continue
        found = read(form, markup, range(0, 999, 11), TOOLS)
        assert found.text == ("So:\n" if begun.startswith("So") else ""), markup
        assert not found.is_cut and found.calls, markup
        assert len(set(found.ids)) == len(found.calls)
        for name, arguments in found.calls:
            schema = Grammar.json_schema(SCHEMAS[name])
            assert form_walks.fits(schema, arguments), markup
        num_calls += len(found.calls)
    assert num_calls > 2


def walked(
    codec: Tokenizer, compiler: GrammarCompiler, grammar: Grammar, seed: int, begun: str
) -> str | None:
    """A random answer of the form that begins so, with its special tokens written out; None if it
    is not at its end after 500 tokens."""
    rng = random.Random(seed)
    constraint = compiler.compile(grammar)
    tokens = codec.encode(begun)
    assert constraint.num_allowed(tokens) == len(tokens)
    constraint.observe(tokens)
    while len(tokens) < 500:
        allowed = np.flatnonzero(constraint.allowed([])).tolist()
        forced = constraint.forced()
        assert allowed and constraint.num_allowed(forced) == len(forced), tokens
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            stream = codec.stream()
            return "".join(codec.special_text(token) or stream.push(token) for token in tokens)
        ends = [each for each in allowed if each >= EOS + 2 or chr(each % 256) in '"}]']
        plain = [each for each in allowed if each < 128 and chr(each).isalnum()]
        chosen = ends if ends and rng.random() < 0.4 else plain or allowed
        token = rng.choice([each for each in chosen if each != EOS])
        constraint.observe([token])
        tokens.append(token)
    return None


@pytest.mark.parametrize("source", CALLS.values(), ids=CALLS)
def test_nothing_of_a_call_that_is_cut_off_is_shown(source: str) -> None:
    form = form_of(source)
    calls = [
        {"id": form.ids.made("look_up", n), "function": {"name": "look_up", "arguments": GIVEN}}
        for n in range(2)
    ]
    written = form.written(calls)
    arguments = json.dumps(GIVEN, ensure_ascii=False)
    ends = [found.end() for found in re.finditer(re.escape(arguments), written)]
    assert len(ends) == 2
    first = written.index('look_up"') + len('look_up"') if form.is_bare else len(form.marker)
    for length in range(first, len(written)):
        found = read(form, written[:length], range(0, 400, 7), TOOLS)
        assert found.text == "", written[:length]
        told = [text for _, text in found.calls]
        num_whole = sum(length >= end for end in ends)
        assert told[:num_whole] == [arguments] * num_whole
        assert all(arguments.startswith(text) for text in told[num_whole:])
        assert found.is_cut or len(told) == num_whole, written[:length]


@pytest.mark.parametrize("source", CALLS.values(), ids=CALLS)
@given(
    text=st.text(st.sampled_from('<|>[]{}", \nab_/:'), max_size=50),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_text_that_has_no_call_stays_as_it_is(source: str, text: str, cuts: list[int]) -> None:
    form = form_of(source)
    for said in (text, f"Write {form.marker} to call, {text}", f"look_up(x) {form.marker}, or"):
        found = read(form, said, cuts, TOOLS)
        assert (found.text, found.calls) == (said, [])
