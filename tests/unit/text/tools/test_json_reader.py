"""Calls whose arguments are JSON are read out of an answer, and text stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.parts.part import CallHead, Part, PartKind
from edge_spec.text.tools.call_format import CallFormat
from edge_spec.text.tools.formats import FORMATS, GENERIC, answer_reader
from fixtures.read_calls import read

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "ü"]}}\n</tool_call>'
F = ("f", '{"a": [1, "ü"]}')
G = ("g", r'{"}\"": {"b": "\\"}}')
CALL_G = f'<tool_call>\n{{"name": "g", "arguments": {G[1]}}}\n</tool_call>'
BARE = CallFormat("", '{"name": "$NAME", "parameters": $ARGUMENTS}', None, "")
pieces = given(cuts=st.lists(st.integers(0, 200), max_size=12))


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (CALL, "", [F]),
        (f"{CALL}\n{CALL}\n", "", [F, F]),
        (f"I ask.\n{CALL}", "I ask.\n", [F]),
        (f"{CALL}\nSo.", "\nSo.", [F]),
        (f"I ask.\n{CALL}\n{CALL}\nSo. \n", "I ask.\n\nSo. \n", [F, F]),
        (CALL.removesuffix("\n</tool_call>"), "", [F]),
        (f"{CALL_G}\n{CALL}", "", [G, F]),
        (f'{CALL}\n<tool_call>\n{{"na', "", [F]),
        (CALL[:-20], "", [("f", '{"a": [1,')]),
        # a call that takes no arguments
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"</tool_call>.', ".", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":{}}', "", [("f", "{}")]),
        # members of other names, and further ones
        (CALL.replace("arguments", "parameters"), "", [F]),
        ('<tool_call>{"id": 3, "name": "f", "arguments": {}, "x": [{}]}', "", [("f", "{}")]),
        (CALL.replace("}}", '}, "x": ["}"]}'), "", [F]),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}', "", [("f", "{}")]),
        # a brace too few or too many, and no closing tag
        (f"{CALL.replace('}}', '}')}.", ".", [F]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>', "", [("f", '{"a": [1]}')]),
        (CALL.replace("}}", "}}}") + CALL, "", [F, F]),
        (CALL.removesuffix("</tool_call>") + CALL + "So.", "So.", [F, F]),
        (CALL.replace("\n</tool_call>", " So.</tool_call>!"), " So.!", [F]),
        (f"{CALL[:-13]}, {CALL[11:]}", "", [F, F]),
        # no calls
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ("Write `<tool_call>` and so on.", "Write `<tool_call>` and so on.", []),
        ('<tool_call>{"name": 1}</tool_call>.', '<tool_call>{"name": 1}</tool_call>.', []),
        *(
            (f"<tool_call>{text}</tool_call>.", f"<tool_call>{text}</tool_call>.", [])
            for text in (
                '{"name": "f"- "arguments": {"a": 1}}',
                '{"name": "f", "arguments"": {"a": 1}}',
                '{"name": "f", "\\arguments": {"a": 1}}',
                '{"name": "f", }',
                '{"name": "f", "argument": {"a": 1}}',
                '{"arguments": {"a": 1}, "name": "f"}',
            )
        ),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("", "", []),
        # one that is cut before its name
        ('Well.\n<tool_call>{"na', "Well.\n", []),
    ],
)
@pieces
def test_calls_are_read_however_the_text_comes(
    text: str, shown: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    assert read(GENERIC, text, cuts)[:2] == (shown, calls)


@given(text=st.text("<tool_cal>/x \n{", max_size=60), cuts=st.lists(st.integers(0, 60), max_size=9))
def test_what_is_no_call_stays_text(text: str, cuts: list[int]) -> None:
    answer = read(GENERIC, text, cuts)
    assert answer.calls == [] and (answer.text == text or answer.is_cut)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "f", "parameters": {"a": [1, "ü"]}}', "", [F]),
        ('{"name": "f", "parameters": {"a": [1, "ü"]}', "", [F]),
        ('{"name": "f", "parameters": {"a"', "", [("f", '{"a"')]),
        ('{"type": "function", "name": "f", "parameters": {"a": [1, "ü"]}}', "", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": [1, "ü"]}}', "", [F]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", ["f", "g"]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]\n', "", ["f", "g"]),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ('{"name": "Ann", "parameters": {"a": 1}}', '{"name": "Ann", "parameters": {"a": 1}}', []),
        ('{"na', '{"na', []),
        ('{"a": 1}', '{"a": 1}', []),
        ("[1, 2]", "[1, 2]", []),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ],
)
@pieces
def test_an_answer_without_tags_is_a_call_or_none(
    text: str, shown: str, calls: list[tuple[str, str] | str], cuts: list[int]
) -> None:
    tools = [{"function": {"name": name}} for name in "fg"]
    expected = [each if isinstance(each, tuple) else (each, "{}") for each in calls]
    assert read(BARE, text, cuts, tools)[:2] == (shown, expected)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "f", "arguments": {"a": [1, "ü"]}}', "", [F]),
        ('```json\n{\n  "name": "f",\n  "arguments": {"a": [1, "ü"]}\n}\n```', "", [F]),
        ('```\n[{"name": "f", "arguments": {"a": [1, "ü"]}}]\n```\nSo.', "\nSo.", [F]),
        ('<tools>\n{"name": "f", "arguments": {"a": [1, "ü"]}}\n</tools>', "", [F]),
        ('{"name": "f", "arguments": {"a": [1, "ü"]}}\n' + CALL_G, "", [F, G]),
        ('{"name": "x", "arguments": {}}', '{"name": "x", "arguments": {}}', []),
        ('{"name": "f", "a": 3, "arguments": {}}', '{"name": "f", "a": 3, "arguments": {}}', []),
        ('```json\n{"name": "Ann"}\n```', '```json\n{"name": "Ann"}\n```', []),
        ('{"a": 1}\n' + CALL, '{"a": 1}\n', [F]),
        ("```python\nf()\n```" + CALL, "```python\nf()\n```", [F]),
        ('I say {"name": "f", "arguments": {}}', 'I say {"name": "f", "arguments": {}}', []),
    ],
)
@pieces
def test_an_answer_that_is_a_call_of_a_known_function_needs_no_tags(
    text: str, shown: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    tools = [{"function": {"name": name}} for name in "fg"]
    assert read(GENERIC, text, cuts, tools)[:2] == (shown, calls)


FENCED = '```json\n{"name": "f", "arguments": {"a": [1, "ü"]}}\n```'
CODE = "```python\nf()\n```"
OTHER = '```json\n{"name": "Ann", "arguments": {"b": "<tool_call>"}}\n```'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"I ask:\n\n{FENCED}", "I ask:\n\n", [F]),
        (f"I ask: {FENCED} So.", "I ask:  So.", [F]),
        (f"a\n{FENCED.replace('json', '')}\nb", "a\n\nb", [F]),
        (f"a\n{FENCED.removesuffix('```')}", "a\n", [F]),
        (f"a\n{FENCED}\n{FENCED}\n\n{CODE}", f"a\n\n\n{CODE}", [F, F]),
        (f"a {FENCED[:-4]},\n{FENCED[8:]}", "a ", [F, F]),
        (f"a {FENCED.replace('{', '[{', 1)[:-4]}]\n```", "a ", [F]),
        (f"a {FENCED} {CALL} {FENCED}", "a ", [F, F, F]),
        (f"{CALL}\n{CODE}\nb {FENCED}", f"\n{CODE}\nb ", [F, F]),
        (f"{CODE}\n{FENCED}", f"{CODE}\n", [F]),
        (f"{OTHER}\n{FENCED}", f"{OTHER}\n", [F]),
        (f"I ask:\n{FENCED[8:-4]}", "I ask:\n", [F]),
        (f"I ask:\n\n[{FENCED[8:-4]}, {FENCED[8:-4]}]\nb", "I ask:\n\n\nb", [F, F]),
        (f'{{"a":\n{{}}}}\n{{"b": 1}}\n{FENCED[8:-4]}', '{"a":\n{}}\n{"b": 1}\n', [F]),
        (CALL.replace("_call", "s").join("ab"), "ab", [F]),
        (f"a ```xml\n{CALL}\n```", "a ", [F]),
        (f"a {FENCED[:8]}{{{FENCED[8:-4]}}}\n```", "a ", [F]),
        (f"{{{FENCED[8:-4]}}}\n{{{FENCED[8:-4]}}}", "", [F, F]),
        (f"<tool_call>{{{FENCED[8:-4]}}}</tool_call>", "", [F]),
        (f"a <function_call>{FENCED[8:-4]}</function_call>", "a ", [F]),
        # other code, other names, no arguments, and what stands within a block
        (f"a {OTHER} b", f"a {OTHER} b", []),
        (FENCED.replace('"arguments"', '"age"'), FENCED.replace('"arguments"', '"age"'), []),
        ('a ```json\n{"name": "f"}\n```', 'a ```json\n{"name": "f"}\n```', []),
        (FENCED.replace("json", "python"), FENCED.replace("json", "python"), []),
        (f"```markdown\n{FENCED}", f"```markdown\n{FENCED}", []),
        (f"````markdown\n{FENCED}\n````", f"````markdown\n{FENCED}\n````", []),
        (f"{CODE[:-4]}\n{FENCED[8:]}", f"{CODE[:-4]}\n{FENCED[8:]}", []),
        ("a <tools> and `<tool>` or ``` <", "a <tools> and `<tool>` or ``` <", []),
        # cut off
        (f"a {FENCED[:12]}", f"a {FENCED[:12]}", []),
        (f"a {FENCED[:28]}", "a ", []),
        (f"a {FENCED[:39]}", "a ", [("f", '{"a"')]),
    ],
)
@pieces
def test_a_call_of_a_known_function_may_follow_a_text(
    text: str, shown: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    tools = [{"function": {"name": name}} for name in "fg"]
    assert read(GENERIC, text, cuts, tools)[:2] == (shown, calls)


def test_a_block_of_code_is_shown_as_soon_as_it_is_no_call() -> None:
    reader = answer_reader(AnswerForm(calls=GENERIC, tools=[{"function": {"name": "f"}}]))
    told = [
        [part.text for part in reader.push(piece)]
        for piece in ("a ```", "json\n", '{"name": ', '"Ann"', ": 3}", "``", "`")
    ]
    assert told == [["a "], [], [], ['```json\n{"name": "Ann"'], [": 3}"], [], []]
    reader = answer_reader(AnswerForm(calls=GENERIC, tools=[{"function": {"name": "f"}}]))
    told = [[part.text for part in reader.push(piece)] for piece in ("```p", "ython\nf()", "\n```")]
    assert told == [["```p"], ["ython\nf()"], ["\n"]]
    reader = answer_reader(AnswerForm(calls=GENERIC, tools=[{"function": {"name": "f"}}]))
    told = [[part.text for part in reader.push(piece)] for piece in ('{"n', '": [', "1, 2")]
    assert told == [[], ['{"n": ['], ["1, 2"]]


@pytest.mark.parametrize("key", ["name", "tool_name", "type"])
@pytest.mark.parametrize("opening", ["{", "[", "3"])
def test_json_is_shown_as_soon_as_a_key_of_calls_has_no_text(key: str, opening: str) -> None:
    reader = answer_reader(AnswerForm(calls=GENERIC, tools=[{"function": {"name": "f"}}]))
    begun = f'{{"{key}": '
    told = [[part.text for part in reader.push(piece)] for piece in (begun, opening, " 1, 2")]
    assert told == [[], [begun + opening], [" 1, 2"]]


@pieces
@pytest.mark.parametrize("name", ["name", "tool_name", "type"])
def test_a_function_may_be_called_as_a_key_of_other_calls_is(name: str, cuts: list[int]) -> None:
    form = FORMATS["apertus"]
    calls = [{"function": {"name": each, "arguments": {"a": 1}}} for each in ("f", name, "g")]
    expected = [(each, '{"a": 1}') for each in ("f", name, "g")]
    assert read(form, form.written(calls), cuts)[:2] == ("", expected)


def test_calls_are_counted_and_told_apart() -> None:
    assert len(set(read(GENERIC, CALL + CALL).ids)) == 2


def test_a_call_has_the_id_that_the_model_writes_before_its_arguments() -> None:
    id, name, arguments = '"id": "abcdefgh1"', '"name": "f"', '"arguments": {"a": 1}'
    for members in ((id, name, arguments), (name, id, arguments)):
        call = f"{{{', '.join(members)}}}"
        answer = read(FORMATS["mistral-v3"], f"[TOOL_CALLS] [{call}]", [])
        assert (answer.calls, answer.ids) == ([("f", '{"a": 1}')], ["abcdefgh1"]), call


@pieces
@pytest.mark.parametrize("id", ['"id": null', '"id": ""'])
def test_a_call_without_an_id_gets_one(id: str, cuts: list[int]) -> None:
    name, arguments = '"name": "f"', '"arguments": {"a": {}}'
    for members in ((id, name, arguments), (id, '"type": "function"', name, arguments)):
        answer = read(GENERIC, f"<tool_call>{{{', '.join(members)}}}</tool_call>", cuts)
        assert answer.calls == [("f", '{"a": {}}')] and answer.ids[0] != "null", members
    text = f"<tool_call>{{{name}, {id}, {arguments}}}</tool_call>"
    assert read(GENERIC, text, cuts).calls == [("f", '{"a": {}}')]


def test_a_call_is_told_as_it_comes_its_name_first() -> None:
    reader = answer_reader(AnswerForm(calls=GENERIC))
    begin, piece, _ = CALL.partition('"a"')
    assert reader.push(begin[:-1]) == []
    (first,) = reader.push(begin[-1:])
    assert first.call is not None
    assert first == Part(PartKind.CALL, "{", CallHead(0, first.call.id, "f"))
    assert reader.push(piece) == [Part(PartKind.CALL, piece)]
    assert not reader.is_cut
    reader.finish()
    assert reader.is_cut
