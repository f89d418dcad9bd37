"""Any chat template takes messages and tools as OpenAI has them, and calls have their form."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from edge_spec.errors import UsageError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.grammar import Grammar, GrammarCompiler
from edge_spec.text.plain_messages import plain_messages
from edge_spec.text.template_traits import TemplateTraits, fitted
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.tools.call_format import CallFormat
from edge_spec.text.tools.formats import FORMATS, GENERIC
from fixtures import form_walks

EOS, VOCAB = 258, 260  # of the byte tokenizer

# As published templates do it, in short. They know no tools:
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] + '' }}{% endfor %}"
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m['content'] + '' }}"
    "{% endfor %}"
)  # nor the system
FIRST = (  # nor the system beyond the first message
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>"
    "{% set messages = messages[1:] %}{% endif %}" + TURNS
)
LATER = (
    "{% for m in messages %}{% if not loop.first and loop.previtem.role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }};{% endfor %}"
)
# They do:
TAGGED = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endfor %}"
)
BARE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OTHER = TAGGED.replace("<tool_call>\n", "<|tool_call|>[").replace("\n</tool_call>", "]")

F: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/digit"}},
            "required": ["n"],
            "$defs": {"digit": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
BARE_FORM = FORMATS["llama-3"]
TAG, END_TAG = "<tool_call>", "</tool_call>"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"n": 3}}}
USER = {"role": "user", "content": "hi"}
CALL_OBJECT = '{"name": "f", "arguments": {"n": 3}}'
TAGGED_CALL = f"<tool_call>\n{CALL_OBJECT}\n</tool_call>"
BARE_CALL = '{"name": "f", "parameters": {"n": 3}}'


def traits_of(source: str) -> TemplateTraits:
    return TemplateTraits(ChatTemplate(source).render)


def rendered(source: str, messages: list[Any], tools: Any = ()) -> str:
    return ChatTemplate(source).render(*fitted(messages, tools, traits_of(source)))


def said(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": str(place)} for place, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("source", "roles", "text"),
    [
        (PLAIN, "system system user user", "[system]0[system]1[user]2[user]3"),
        (FIRST, "system system user user", "<0\n\n1>[user]2\n\n3"),
        (FIRST, "system user assistant system user", "<0>[user]1[assistant]2[user]3\n\n4"),
        (FIRST, "user assistant assistant", "[user]0[assistant]1\n\n2"),
        (TURNS, "system user assistant", "[user]0\n\n1[assistant]2"),
        (TURNS, "system system", "[user]0\n\n1"),
        (FIRST, "system system", "<0\n\n1>"),
        # no more is changed than has to be: this one wants turns, and any system after the first
        (LATER, "system user system user assistant assistant", "0;1;2;3;4\n\n5;"),
        (LATER, "user system user", "0;1;2;"),
    ],
)
def test_no_message_is_refused_or_lost(source: str, roles: str, text: str) -> None:
    assert rendered(source, said(*roles.split())) == text


def test_what_a_template_takes_stays_as_it_is() -> None:
    messages = said("system", "user", "assistant", "user")
    for source in (PLAIN, FIRST, TAGGED):
        assert fitted(messages, (), traits_of(source)) == (messages, ())


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (PLAIN, None),
        (TURNS, None),
        (TAGGED.replace("m.tool_calls", "[]"), None),
        (TAGGED, GENERIC),
        (OTHER, FORMATS["granite-3"]),
        (BARE, BARE_FORM),
    ],
)
def test_the_form_of_calls_is_the_templates(source: str, form: CallFormat | None) -> None:
    native = traits_of(source).native_tools
    assert (native and native.form) == form


@pytest.mark.parametrize("source", [PLAIN, TURNS, FIRST, OTHER, TAGGED, BARE])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_calls_and_results_are_in_every_prompt(source: str, num_calls: int) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL] * num_calls}
    results = [{"role": "tool", "content": f"r{n}", "tool_call_id": "1"} for n in range(num_calls)]
    text = rendered(source, [USER, calls, *results], [F])
    own = {BARE: BARE_CALL, OTHER: f"<|tool_call|>[{CALL_OBJECT}]"}
    written = own.get(source, TAGGED_CALL)
    assert text.count(written) == num_calls
    assert "None" not in text and "r0" in text and f"r{num_calls - 1}" in text
    assert '"name": "f"' in text and "#/$defs/digit" in text


@pytest.mark.parametrize(
    ("arguments", "given", "written"),
    [
        # a template of mappings alone, of texts alone, and of both
        ("call.function.arguments | tojson", '{"n":3}', '{"n": 3}'),
        ("call.function.arguments + ''", {"n": 3}, '{"n": 3}'),
        (
            "call.function.arguments if call.function.arguments is string"
            " else call.function.arguments | tojson",
            '{"n":3}',
            '{"n": 3}',
        ),
        ("call.function.arguments | tojson", "", "{}"),
        ("call.function.arguments | tojson", "[3]", '"[3]"'),  # what is no object stays
    ],
)
def test_arguments_are_of_the_kind_that_the_template_takes(
    arguments: str, given: Any, written: str
) -> None:
    source = TAGGED.replace("call.function.arguments | tojson", arguments)
    call = {"function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert f'"arguments": {written}}}' in rendered(source, [USER, message], [F])


@pytest.mark.parametrize("content", ["", None])
def test_a_message_that_only_calls_has_an_empty_content(content: Any) -> None:
    source = TAGGED.replace("m.content }}", "m['content'] + '' }}")
    message = {"role": "assistant", "tool_calls": [CALL]}
    if content is not None:
        message["content"] = content
    (_, fitting), _ = fitted(plain_messages([USER, message]), [F], traits_of(source))
    assert fitting["content"] == ""


def test_calls_that_a_template_shows_in_a_form_of_its_own_stay_where_no_tools_are_given() -> None:
    calls = {"role": "assistant", "tool_calls": [CALL], "content": ""}
    result = {"role": "tool", "content": "r"}
    assert fitted([USER, calls, result], (), traits_of(OTHER)) == ([USER, calls, result], ())
    messages, _ = fitted([USER, calls, result], (), traits_of(PLAIN))
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_a_template_that_is_made_for_tools_alone_knows_them() -> None:
    source = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + TAGGED.partition("}}")[2]
    assert traits_of(source).native_tools is not None
    assert '"name": "f"' in rendered(source, [USER], [F])


@pytest.mark.parametrize("tools", [["f"], [{"type": "function"}], [{"function": {"name": 1}}]])
def test_tools_without_a_name_are_refused(tools: Any) -> None:
    with pytest.raises(UsageError, match="without a function's name"):
        fitted([USER], tools, traits_of(PLAIN))
    with pytest.raises(UsageError, match="without a function's name"):
        message = {"role": "assistant", "content": None, "tool_calls": tools}
        fitted([USER, message], (), traits_of(TAGGED))


EMPTY_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "options", "fits", "not_fits"),
    [
        (
            GENERIC,
            {"required": False, "several": True},
            ["", "hi", "<b> <tool_c", TAGGED_CALL, f"So.\n{TAGGED_CALL}\n{EMPTY_G}"],
            [f"{TAGGED_CALL} so", "<tool_call>x", TAGGED_CALL.replace("3", "0")],
        ),
        (
            GENERIC,
            {"required": True, "several": False},
            [TAGGED_CALL, EMPTY_G],
            ["hi", f"{TAGGED_CALL}\n{EMPTY_G}", f" {TAGGED_CALL}"],
        ),
        (
            GENERIC,
            {"required": False, "several": False, "text": Grammar.json_schema({"type": "boolean"})},
            [TAGGED_CALL, "true"],
            ["hi", f"true{TAGGED_CALL}"],
        ),
        (
            BARE_FORM,
            {"required": False, "several": True},
            [BARE_CALL, "hi", '{"a": 1}', '{"name": "f"', f"So: {BARE_CALL}"],
            [f"{BARE_CALL}\n", BARE_CALL.replace("3", "3, 4")],
        ),
        (BARE_FORM, {"required": True, "several": True}, [BARE_CALL], ["hi", '{"a": 1}']),
    ],
)
def test_an_answer_is_held_to_its_calls(
    form: CallFormat, options: Any, fits: list[str], not_fits: list[str]
) -> None:
    grammar = form.grammar([F, G], **options)
    for text in fits + not_fits:
        assert form_walks.fits(grammar, text) == (text in fits), text


@pytest.mark.parametrize("required", [True, False])
def test_a_tag_that_is_one_token_begins_a_call(byte_tokenizer_json: str, required: bool) -> None:
    """As in most vocabularies of models that call tools. The token is text, no special one; its
    letters fit as well, and within a string it is text, too."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer_json)
    tokenizer.add_tokens([TAG, END_TAG])
    codec = Tokenizer(tokenizer.to_str())
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = GENERIC.grammar([tool], required=required, several=False)
    compiler = GrammarCompiler(codec, VOCAB + 2, (EOS,))
    call = f'{TAG}\n{{"name": "f", "arguments": {{"a": "{TAG}"}}}}\n{END_TAG}'
    tokens = codec.encode(call)
    assert tokens.count(codec.vocabulary()[TAG]) == 2
    constraint = compiler.compile(grammar)
    for end, token in enumerate(tokens):
        assert constraint.allowed(tokens[:end])[token], end
    for written in (tokens, list(call.encode())):
        constraint = compiler.compile(grammar)
        assert constraint.num_allowed([*written, EOS]) == len(written) + 1
        constraint.observe(written)
    assert compiler.compile(grammar).num_allowed([*tokens[:-1], EOS]) == len(tokens) - 1
