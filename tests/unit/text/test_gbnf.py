"""Grammars as llama.cpp has them hold answers as they do there."""

from __future__ import annotations

import pytest

from edge_spec.errors import UsageError
from edge_spec.text.grammar import Grammar
from fixtures.form_walks import compiler, fits


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= "a"', ["a"], ["", "b", "aa"]),
        ('root::="a"\r\n', ["a"], ["b"]),
        ('# one\nroot ::= ("a" | "b")+ # two\n', ["a", "abba"], ["", "c"]),
        ('root ::=\n  "a" |\n  "b"', ["a", "b"], ["ab"]),
        ("root ::= one-digit{2}\none-digit ::= [0-9]", ["12"], ["1", "123"]),
        ('root ::= "x"{2,}', ["xx", "xxxx"], ["x"]),
        ('root ::= [^"\\\\]*', ["hi there", "é"], ['a"', "a\\"]),
        ("root ::= [\\x41-\\x43\\]]+", ["AB]"], ["D"]),
        ('root ::= "\\u00e9\\U0001F600\\\\u0041"', ["é\U0001f600\\u0041"], ["e"]),
        ("root ::= [\\u3041-\\u3093]+", ["かな"], ["カ"]),
        ('root ::= "a" root | "b"', ["b", "aab"], ["aa"]),
        ('root ::= inner\ninner ::= "(" inner ")" | ""', ["", "(())"], ["(()"]),
        ('root ::= start "start"\nstart ::= [start]', ["tstart"], ["xstart"]),
        ('root ::= Foo_bar\nFoo_bar ::= "a/b" "%"?', ["a/b", "a/b%"], ["a"]),
        ('start: "a" WORD\nWORD: /[b-d]+/', ["abcd"], ["a"]),  # Lark
    ],
)
def test_a_text_that_fits_is_allowed_to_its_end(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    asked = [*texts, *others]
    assert [text for text in asked if fits(Grammar.gbnf(grammar), text)] == texts


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("", "No 'root' rule"),
        ('rot ::= "a"', "No 'root' rule"),
        ("root ::= missing", "missing"),
        ('root ::= "a', "Unexpected end"),
        ('root ::= "\\q"', "escape"),
        ('root ::= <think> "a"', "Expected name"),
        ("root ::= " + "(" * 5000, "no answer can have this form"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(grammar: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        compiler().compile(Grammar.gbnf(grammar))
    assert "\n" not in str(caught.value)
