"""Each format is found in a template, read as JSON in any pieces, and held by a grammar."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.grammar import GrammarCompiler
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.plain_messages import Tools
from edge_spec.text.template_traits import TemplateTraits
from edge_spec.text.tools.call_format import TAG
from edge_spec.text.tools.formats import FORMATS, PYTHON, answer_reader
from fixtures import form_walks
from fixtures.call_templates import JSON, TEMPLATES, template
from fixtures.echo_model import EOS, VOCAB_SIZE, byte_tokenizer
from fixtures.read_calls import read

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer", "minimum": 1, "maximum": 30},
    "wide": {"type": "boolean"},
    "unit": {"type": ["string", "null"]},
    "kind": {"enum": ["short", "long"]},
    "names": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    "place": {
        "type": "object",
        "properties": {"x": {"type": "number"}, "label": {"type": "string"}},
        "required": ["x"],
    },
    "more": {},
}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("weather", "look-up.v2")
]
_PLAIN = frozenset(b"abcT019 _-\"'<>[]{}()")
PLAIN = {"city": "Lima", "days": 3}
FULL = {
    "city": "a \"b\" 'c' <d>\n\n  e & \u00e9 5",
    "days": 12,
    "wide": True,
    "unit": None,
    "kind": "long",
    "names": ["x", "", "y z"],
    "place": {"x": -1.5, "label": "l"},
    "more": "text",
}


def calls_of(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"abcdefgh{n}", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(calls)
    ]


def read_values(name: str, text: str, cuts: list[int]) -> list[tuple[str, Any]]:
    answer = read(FORMATS[name], text, cuts, TOOLS)
    assert not answer.text.strip() and not answer.is_cut, answer
    assert len(set(answer.ids)) == len(answer.calls)
    return [(called, json.loads(arguments)) for called, arguments in answer.calls]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_found_in_what_a_template_writes(name: str) -> None:
    native = TemplateTraits(ChatTemplate(TEMPLATES[name]).render).native_tools
    assert native is not None and native.form == FORMATS[name]
    assert native.shows_calls and native.takes_several == (FORMATS[name].between is not None)


@pytest.mark.parametrize("old", ['{"name": ', '"arguments": '])
def test_a_format_is_found_however_a_template_spaces_it(old: str) -> None:
    source = TEMPLATES["hermes"].replace(old, old.rstrip())
    native = TemplateTraits(ChatTemplate(source).render).native_tools
    assert native is not None and native.form == FORMATS["hermes"]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_shows_is_read_as_json_of_the_schemas_types(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    given = {n: value for n, value in FULL.items() if value is not None}
    several = [[("weather", PLAIN), ("look-up.v2", given)]] if FORMATS[name].between else []
    for calls in ([("weather", given)], *several):
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": calls_of(*calls)},
        ]
        shown = template.render(messages, TOOLS, add_generation_prompt=False)
        text = shown.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
        for seed in range(8):
            cuts = random.Random(seed).sample(range(10_000), seed)
            assert read_values(name, text, cuts) == calls
        assert read_values(name, text, list(range(len(text)))) == calls


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_for_the_history_is_read_back_and_fits(name: str) -> None:
    form = FORMATS[name]
    grammar = form.grammar(TOOLS, required=True, several=True)
    several = [("look-up.v2", PLAIN), ("weather", {"city": ""})]
    for calls in ([("weather", FULL)], several if form.between else several[:1]):
        text = form.written(calls_of(*calls))
        assert read_values(name, text, []) == calls
        assert form_walks.fits(grammar, text), text
    if form.keyed is not None:
        texts = calls_of(("weather", json.dumps(PLAIN)))
        assert form.written(texts) == form.written(calls_of(("weather", PLAIN)))


@pytest.mark.parametrize("name", FORMATS)
def test_every_text_that_the_grammar_allows_is_a_call_that_fits_the_schema(name: str) -> None:
    form = FORMATS[name]
    grammar = form.grammar(TOOLS, required=True, several=True)
    ends = ['"'] if form.keyed is None else [form.keyed.closing, form.keyed.quote]
    found = 0
    for seed in range(6):
        text = walked_to(grammar, seed, [end for end in ends if end])
        if text is not None:
            for _, arguments in read_values(name, text, []):
                assert_fits(arguments)
                found += 1
    assert found > 2


def walked_to(grammar: Any, seed: int, ends: list[str]) -> str | None:
    """A text of the form, drawn at random, in which texts are ended now and then."""
    rng = random.Random(seed)
    constraint = form_walks.compiler().compile(grammar)
    text = bytearray()
    while len(text) < 2000:
        allowed = np.flatnonzero(constraint.allowed([])).tolist()
        if form_walks.EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return text.decode()
        fitting = [list(end.encode()) for end in ends if len(allowed) > 20 and rng.random() < 0.3]
        tokens = next((each for each in fitting if constraint.num_allowed(each) == len(each)), None)
        if tokens is None:
            plain = [token for token in allowed if token in _PLAIN]
            tokens = [rng.choice(plain or [each for each in allowed if each != form_walks.EOS])]
        constraint.observe(tokens)
        text += bytes(tokens)
    return None


def assert_fits(arguments: dict[str, Any]) -> None:
    assert "city" in arguments and arguments.keys() <= PROPERTIES.keys(), arguments
    kinds = {"city": str, "days": int, "wide": bool, "kind": str, "names": list, "place": dict}
    for name, kind in kinds.items():
        assert name not in arguments or type(arguments[name]) is kind, arguments
    assert 1 <= arguments.get("days", 1) <= 30 and len(arguments.get("names", ())) <= 3
    assert arguments.get("kind", "short") in ("short", "long")
    assert all(isinstance(each, str) for each in arguments.get("names", ()))
    assert "x" in arguments.get("place", {"x": 1})


@pytest.mark.parametrize("name", [name for name in FORMATS if TAG.search(FORMATS[name].opening)])
def test_tags_that_are_special_tokens_are_written_as_such(name: str) -> None:
    form = FORMATS[name]
    grammar = form.grammar(TOOLS, required=True, several=True)
    calls = [("weather", FULL), ("weather", PLAIN)]
    text = form.written(calls_of(*calls))
    tags = sorted({tag for tag in TAG.findall(text) if "=" not in tag} - {"<d>"})
    codec = byte_tokenizer(tags)
    constraint = GrammarCompiler(codec, VOCAB_SIZE + len(tags), (EOS,)).compile(grammar)
    tokens = codec.encode(text)
    assert len(tokens) < len(text.encode())
    assert constraint.num_allowed([*tokens, EOS]) == len(tokens) + 1
    stream = codec.stream()
    markup = "".join(stream.push(token) or codec.special_text(token) for token in tokens)
    assert read_values(name, markup, []) == calls


def in_function_tag(*arguments: tuple[str, str], name: str = "weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


BOTH_SPELLINGS = {"x": True, "label": "true null", "a": None}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("city", '"quoted"', '"quoted"'),
        ("city", " \n two \n ", " \n two \n "),
        ("city", "", ""),
        ("city", "<parameter=days>\n3", "<parameter=days>\n3"),
        ("city", "</function>", "</function>"),
        ("days", "5", 5),
        ("days", " 5 ", 5),
        ("days", '"5"', 5),
        ("days", "5.0", 5.0),
        ("days", "five", "five"),
        ("wide", "True", True),
        ("wide", "false", False),
        ("unit", "null", None),
        ("unit", "None", None),
        ("unit", "nullable", "nullable"),
        ("unit", "5", "5"),
        ("names", '["a", "</parameter>"]', ["a", "</parameter>"]),
        ("names", "['a', 'b']", ["a", "b"]),
        ("place", "{'x': 1, 'on': True}", {"x": 1, "on": True}),
        ("place", "{'x': true, 'label': 'true null', \"a\": None}", BOTH_SPELLINGS),
        ("place", '{"x": True, "label": "true null", "a": null}', BOTH_SPELLINGS),
        ("place", '{"x": true,}', {"x": True}),
        ("place", "{'x': '\\\\d \\\\n', 'a': '\\d'}", {"x": "\\d \\n", "a": "\\d"}),
        ("place", '{"x": 1', '{"x": 1'),
        ("more", "[1, 2]", [1, 2]),
        ("more", "2 euros", "2 euros"),
        ("more", "1e5", 1e5),
        ("more", "NaN", "NaN"),
        ("more", "9" * 5000, "9" * 5000),
        ("more", "[" * 5000, "[" * 5000),
        ("unknown", "5", "5"),
    ],
)
def test_a_value_has_the_type_of_its_schema(key: str, written: str, meant: Any) -> None:
    text = (
        in_function_tag(("days", "1"), (key, written))
        if key != "days"
        else in_function_tag((key, written))
    )
    ((_, arguments),) = read_values("qwen3-coder", text, [])
    assert arguments[key] == meant and type(arguments[key]) is type(meant)


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma-4", "lfm2"])
@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"properties": {"a": {"enum": ["b", "c"]}}}, {"a": "b"}, [{"a": "d"}]),
        (
            {"properties": {"a": {"type": "object", "patternProperties": {"^b": {}}}}},
            {"a": {"b": 1}},
            [{"a": {"c": 1}}],
        ),
        (
            {"properties": {"a": False}, "additionalProperties": {"type": "integer"}},
            {"b": 1},
            [{"a": 1}, {"b": "x"}],
        ),
        (
            {"properties": {"a": {"type": "array", "prefixItems": [{"const": 1}, False]}}},
            {"a": [1]},
            [{"a": [1, 2]}, {"a": [2]}],
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/n"}},
                "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
            },
            {"a": {"n": {"n": {}}}},
            [{"a": {"m": {}}}],
        ),
    ],
)
def test_arguments_are_held_to_their_schemas(
    name: str, schema: Any, fitting: Any, others: list[Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = FORMATS[name]
    grammar = form.grammar([tool], required=True, several=False)
    for value in [fitting, *others]:
        text = form.written(calls_of(("f", value)))
        assert form_walks.fits(grammar, text) == (value is fitting), text
    ((_, arguments),) = read(form, form.written(calls_of(("f", fitting))), [], [tool]).calls
    assert json.loads(arguments) == fitting


def test_a_schema_that_names_others_again_and_again_is_read_once() -> None:
    parts = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
    last = {"type": "integer"}
    schema = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**parts, "40": last}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = FORMATS["qwen3-coder"].grammar([tool], required=True, several=False)
    text = in_function_tag(("a", "3"), name="f")
    assert form_walks.fits(grammar, text) and not form_walks.fits(grammar, text.replace("3", "b"))
    assert read(FORMATS["qwen3-coder"], text, [], [tool]).calls == [("f", '{"a": 3}')]


UNION = {
    "anyOf": [{"$ref": "#/$defs/one"}, {"properties": {"b": {"type": "string"}}}],
    "properties": {"c": {"type": "integer"}},
    "required": ["c"],
    "$defs": {"one": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma-4", "lfm2"])
def test_arguments_of_several_schemas_are_held_to_what_all_say(name: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": UNION}}
    form = FORMATS[name]
    grammar = form.grammar([tool], required=True, several=False)
    for value in ({"c": 1, "a": 1}, {"c": 1, "b": "x"}, {"c": 1}):
        text = form.written(calls_of(("f", value)))
        assert form_walks.fits(grammar, text), text
        ((_, arguments),) = read(form, text, [], [tool]).calls
        assert json.loads(arguments) == value
    for value in ({"a": 1}, {"c": "x"}):
        assert not form_walks.fits(grammar, form.written(calls_of(("f", value))))


TOLD = "{% if tools %}Write [f1(name1=value1), f2()].{% endif %}"


@pytest.mark.parametrize(
    ("source", "is_known"),
    [
        (
            TOLD + template("[", "{{ f.name }}(?{{ f.arguments.values() | first }})", ", ", "]"),
            True,
        ),
        (template("[", "{{ f.name }}(?{{ f.arguments.values() | first }})", ", ", "]"), False),
        # the name of an argument is a tag
        (
            template(
                "<call>",
                "{{ f.name }}{% for k, v in f.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>"
                "{% endfor %}",
                "</call><call>",
                "</call>",
            ),
            False,
        ),
    ],
)
def test_a_form_that_is_told_and_shown_otherwise_is_the_one_that_is_told(
    source: str, is_known: bool
) -> None:
    native = TemplateTraits(ChatTemplate(source).render).native_tools
    assert (native is not None and native.form == PYTHON and not native.shows_calls) == is_known
    assert is_known or native is None


LITERALS = [
    ("days=5, wide=True", {"days": 5, "wide": True}),
    ("wide=false, unit=null, more=None", {"wide": False, "unit": None, "more": None}),
    ("city='it\\'s', kind=\"long\"", {"city": "it's", "kind": "long"}),
    ('city="a\\u00e9\\ud83d\\ude00\\n\\\\"', {"city": "a\u00e9\U0001f600\n\\"}),
    (
        "names=['a', \"b\"], place={'x': 1, \"label\": 'z'}",
        {"names": ["a", "b"], "place": {"x": 1, "label": "z"}},
    ),
    ("more=[{'a': true, 'b': 'true'}, null]", {"more": [{"a": True, "b": "true"}, None]}),
    (r'city="\d+ \\d"', {"city": r"\d+ \d"}),
    ("city=5", {"city": "5"}),
    ("days='5'", {"days": 5}),
    ('city="a, b)", days=2', {"city": "a, b)", "days": 2}),
    ("", {}),
    ("'positional'", {}),
]


OBJECTS = [
    ("{x:[1,2,],z:None}", {"x": [1, 2], "z": None}),
    ("{x:'y'}", {"x": "y"}),
    ("{x:'true',y:True}", {"x": "true", "y": True}),
    ("""{x:<|"|>don't 'a'<|"|>,y:'it',z:it}""", {"x": "don't 'a'", "y": "it", "z": "it"}),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        *(("lfm2", f"<|tool_call_start|>[weather({w})]<|tool_call_end|>", m) for w, m in LITERALS),
        *(
            ("gemma-4", f"<|tool_call>call:weather{{place:{w}}}<tool_call|>", {"place": m})
            for w, m in OBJECTS
        ),
    ],
)
def test_arguments_in_quotes_of_python_or_of_a_formats_own_are_read(
    name: str, text: str, meant: Any
) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read_values(name, text, cuts) == [("weather", meant)]


TEXTS = [  # format, and a text that is no call
    ("qwen3-coder", "I call <tool_call> now"),
    ("qwen3-coder", "<function=nothing>\n</function>"),
    ("qwen3-coder", "a < b <tool"),
    ("glm-4.5", "<tool_call>is a tag"),
    ("glm-4.5", "<tool_call>x</tool_call>"),
    ("llama-4", "<|python_start|>x"),
    ("glm-4.5", "<arg_key>a</arg_key>"),
    ("minimax-m2", '<invoke name="other">'),
    ("gemma-4", "<|tool_call>not: a call"),
    ("llama-4", "[1](link) and [weather]"),
    ("llama-4", "[other(a=1)]"),
    ("llama-4", "So: [weather(days=1)]"),
    ("llama-4", "["),
    ("lfm2", "[weather(days=1)]"),
]
INVOKED = '<invoke name="weather">\n<parameter name="days">3</parameter>\n</invoke>'
THREE = [  # format and text of a call for three days
    ("qwen3-coder", "<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>"),
    (
        "qwen3-coder",
        "<tool_call><function=weather><parameter=days>3</parameter></function></tool_call>",
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</function>\n</tool_call>",
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</tool_call>",
    ),
    ("qwen3-coder", f"{in_function_tag(('days', '3'), ('days', '4'))}"),
    ("qwen3-coder", in_function_tag(("days", "3")).replace("<parameter", "so <parameter")),
    ("minimax-m2", INVOKED),
    ("glm-4.5", "<tool_call>weather<arg_key>days</arg_key>3</arg_value></tool_call>"),
    (
        "qwen3-coder",
        in_function_tag(("days", "3")).replace("</function>", "</parameter></function>"),
    ),
    ("glm-4.5", "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"),
]
BROKEN = [  # format, text, text that is shown, arguments of the calls
    *((name, text, text, []) for name, text in TEXTS),
    *((name, text, "", ['{"days": 3}']) for name, text in THREE),
    ("qwen3-coder", f"Hi.\n\n{in_function_tag(('days', '3'))}", "Hi.\n\n", ['{"days": 3}']),
    ("qwen3-coder", f"{in_function_tag(('days', '3'))}\n\nBye", "\n\nBye", ['{"days": 3}']),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nLima\n</function>\n</tool_call>",
        "",
        ['{"city": "Lima"}'],
    ),
    ("qwen3-coder", in_function_tag(name="other"), "", ["{}"]),
    (
        "minimax-m2",
        f"<minimax:tool_call>\n{INVOKED}\n{INVOKED}\n</minimax:tool_call>",
        "",
        ['{"days": 3}'] * 2,
    ),
    (
        "minimax-m2",
        f"<minimax:tool_call>\n{INVOKED}\n</minimax:tool_call> Bye",
        " Bye",
        ['{"days": 3}'],
    ),
    ("qwen3-coder", in_function_tag(("a[b]:c's <d", "3")), "", ['{"a[b]:c\'s <d": "3"}']),
    ("qwen3-coder", in_function_tag(('"days"', "3")), "", ['{"days": 3}']),
    (
        "glm-4.5",
        "<tool_call>weather<arg_key>a > b</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        ['{"a > b": "3"}'],
    ),
    (
        "gemma-4",
        "<|tool_call>call:weather{filter[a]:1,price (USD):2}<tool_call|>",
        "",
        ['{"filter[a]": 1, "price (USD)": 2}'],
    ),
    ("llama-4", "[weather(filter[a:b]=1, days=2)]", "", ['{"filter[a:b]": 1, "days": 2}']),
    ("llama-4", '[weather(days=3, "y"]}), weather(days=4)]', "", ['{"days": 3}', '{"days": 4}']),
    ("glm-4.5", "<tool_call>weather</tool_call>", "", ["{}"]),
    ("qwen3-coder", in_function_tag(("days", "3")).replace("<", "  <"), "  ", ['{"days": 3}']),
    ("gemma-4", "<|tool_call>call:weather{}<tool_call|>", "", ["{}"]),
    (
        "gemma-4",
        '<|tool_call>call:weather{ city: <|"|>a<|"|>, days: 3 }<tool_call|>',
        "",
        ['{"city": "a", "days": 3}'],
    ),
    (
        "gemma-4",
        '<|tool_call>call:weather{place:{<|"|>x<|"|>:1}}<tool_call|>',
        "",
        ['{"place": {"x": 1}}'],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[weather(days=3),weather(days=4)]<|tool_call_end|>",
        "",
        ['{"days": 3}', '{"days": 4}'],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[weather( days = 3 )]<|tool_call_end|> Bye",
        " Bye",
        ['{"days": 3}'],
    ),
    ("llama-4", "[weather(days=3), weather(days=4)]", "", ['{"days": 3}', '{"days": 4}']),
    ("llama-4", "<|python_start|>[weather()]", "", ["{}"]),
]


@pytest.mark.parametrize(("name", "text", "shown", "arguments"), BROKEN)
def test_calls_are_read_however_they_are_spaced_or_malformed_and_texts_are_none(
    name: str, text: str, shown: str, arguments: list[str]
) -> None:
    for cuts in ([], list(range(len(text)))):
        answer = read(FORMATS[name], text, cuts, TOOLS)
        assert (answer.text, answer.is_cut) == (shown, False)
        assert [given for _, given in answer.calls] == arguments


def test_a_text_is_told_while_it_is_written() -> None:
    reader = answer_reader(AnswerForm(calls=FORMATS["qwen3-coder"], tools=TOOLS))
    told = [
        part.text
        for piece in in_function_tag(("city", "a\nlong\ntext"))
        for part in reader.push(piece)
    ]
    assert "".join(told) == '{"city": "a\\nlong\\ntext"}'
    assert len([piece for piece in told if piece]) > 10


def test_a_call_of_a_grammar_may_have_what_its_schema_allows_in_the_templates_spelling() -> None:
    grammar = FORMATS["qwen3-coder"].grammar(TOOLS, required=False, several=False)
    fits = [
        "",
        "text with < and <tool",
        "<function=other>, <function=weather and weather>",
        f"So.\n{in_function_tag(('city', 'a'), ('days', '3'), ('wide', 'True'))}",
        in_function_tag(("city", "a"), ("wide", "true"), ("unit", "null"), ("kind", "short")),
    ]
    not_fits = [
        in_function_tag(("city", "a"), ("days", "0")),
        in_function_tag(("days", "3")),
        in_function_tag(("city", "a"), ("kind", "other")),
        in_function_tag(("city", "a"), ("other", "b")),
        in_function_tag(("city", "a"), name="other"),
        f"{in_function_tag(('city', 'a'))} so",
        f"{in_function_tag(('city', 'a'))}{in_function_tag(('city', 'a'))}",
    ]
    for text in fits + not_fits:
        assert form_walks.fits(grammar, text) == (text in fits), text


def damaged(text: str, rng: random.Random) -> str:
    """A call with pieces of it left out, doubled or replaced, or with an end of such pieces."""
    pieces = re.findall(r"</?[^<>]*>|\w+|\s+|.", text)
    others = [*pieces, "<", '"', "'", "\\", "\n", " ", "{", "[", "\u00e9"]
    if rng.random() < 0.5:
        return text[: rng.randrange(len(text))] + "".join(rng.choices(others, k=6))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(pieces))
        pieces[place : place + rng.randint(0, 1)] = rng.choices(others, k=rng.randint(0, 2))
    return "".join(pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_model_writes_is_read_the_same_in_any_pieces(name: str) -> None:
    form = FORMATS[name]
    call = form.written(calls_of(("weather", FULL), ("look-up.v2", PLAIN)))
    for seed in range(25):
        rng = random.Random(seed)
        text = damaged(call, rng)
        whole = read(form, text, [], TOOLS)
        for cuts in (list(range(len(text))), [rng.randrange(10**6) for _ in range(7)]):
            assert read(form, text, cuts, TOOLS)[:3] == whole[:3], text
        told = [] if name in JSON else whole.calls[:-1] if whole.is_cut else whole.calls
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in told), text


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_of_a_call_that_is_cut_off_is_shown(name: str) -> None:
    form = FORMATS[name]
    arguments = json.dumps(PLAIN)
    text = form.written(calls_of(*[("weather", PLAIN)] * (2 if form.between else 1)))
    first = len(form.marker)
    if form.is_bare or form.keyed is not None:
        first = text.index("weather") + len('weather"')
    for length in range(first, len(text.rstrip())):
        found = read(form, text[:length], range(0, 400, 7), TOOLS)
        assert found.text == "", text[:length]
        told = [given for _, given in found.calls]
        assert all(given == arguments for given in told[:-1])
        assert all(arguments.startswith(given) for given in told)
        assert found.is_cut or arguments in (*told[-1:], *[arguments][len(told) :]), text[:length]


@pytest.mark.parametrize("name", JSON)
@given(
    text=st.text(st.sampled_from('<|>[]{}", \nab_/:'), max_size=50),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_text_that_has_no_call_stays_as_it_is(name: str, text: str, cuts: list[int]) -> None:
    form = FORMATS[name]
    for said in (text, f"Write {form.marker} to call, {text}", f"weather(x) {form.marker}, or"):
        found = read(form, said, cuts, TOOLS)
        assert (found.text, found.calls) == (said, [])
