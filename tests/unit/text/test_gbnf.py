"""Grammars as llama.cpp has them hold answers as they do there."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.text.grammar import Grammar, GrammarCompiler

EOS, VOCAB = 258, 260  # of the byte tokenizer


@pytest.fixture
def compiler(byte_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, VOCAB, (EOS,))


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
    compiler: GrammarCompiler, grammar: str, texts: list[str], others: list[str]
) -> None:
    def fits(text: str) -> bool:
        tokens = [*text.encode(), EOS]
        return compiler.compile(Grammar.gbnf(grammar)).num_allowed(tokens) == len(tokens)

    assert [fits(text) for text in texts] == [True] * len(texts)
    assert [fits(text) for text in others] == [False] * len(others)


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
def test_what_is_no_grammar_is_refused_in_one_line(
    compiler: GrammarCompiler, grammar: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        compiler.compile(Grammar.gbnf(grammar))
    assert "\n" not in str(caught.value)
