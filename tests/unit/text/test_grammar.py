"""Answers of a given form: the form holds, and drafting changes nothing about the text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers

from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler, SamplingParams, permitted
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import GuardedDrafter
from edge_spec.drafters.lookup.suffix import ForcedDrafter, SuffixDrafter
from edge_spec.engine.results import FinishReason
from edge_spec.errors import UsageError
from edge_spec.text.grammar import Grammar, GrammarCompiler
from edge_spec.text.tokenizer import SourceEnd, Tokenizer
from fixtures.trained_tokenizers import sentencepiece, unigram

EOS, VOCAB = 258, 260  # of the byte tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "born": {"enum": [1815, 1912]}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
PERSON = Grammar.json_schema(SCHEMA)
TEXT = b'{"name": "Ada", "born": 1815}'


@pytest.fixture
def compiler(byte_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, VOCAB, (EOS,))


def test_a_model_without_an_end_is_asked_for_no_form(byte_tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="no end of text"):
        GrammarCompiler(byte_tokenizer, VOCAB, ()).compile(PERSON)


def test_what_an_encoder_decoder_puts_around_its_sources_is_in_no_answer(
    byte_tokenizer_json: str,
) -> None:
    codec = Tokenizer(byte_tokenizer_json, end=SourceEnd((EOS, 1), 1, before=(2,)))
    constraint = GrammarCompiler(codec, VOCAB, (EOS,)).compile(PERSON)
    assert constraint.forced() == list(b'{"name": "A')
    assert constraint.num_allowed([*TEXT, EOS]) == len(TEXT) + 1


@pytest.mark.parametrize("library", [unigram(), sentencepiece("first")], ids=["all", "first"])
def test_no_space_is_put_before_an_answer(library: tokenizers.Tokenizer) -> None:
    codec = Tokenizer(library.to_str())
    size = max(codec.vocabulary().values()) + 1
    constraint = GrammarCompiler(codec, size, (1,)).compile(PERSON)
    forced = b"".join(map(codec.piece, constraint.forced()))
    assert forced.startswith(b'{"name"') and TEXT.startswith(forced)
    text = codec.encode(f"a{TEXT.decode()}")[len(codec.encode("a")) :]
    assert constraint.num_allowed(text) == len(text)


@pytest.mark.parametrize("seed", [None, *range(4)])
@pytest.mark.parametrize("kind", ["plain", "suffix", "wrong"])
def test_the_answer_fits_its_schema_and_is_that_of_plain_decoding(
    make_engine: Any, remembers_all: Any, tree_drafter: Any, seed: int | None, kind: str
) -> None:
    """The model's own text is random bytes. Draft tokens: of the schema, of an earlier answer, and
    ones that the schema forbids."""
    sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
    wrong = tree_drafter(lambda text, budget: ([ord("x"), ord("y")], [0, 1]))
    drafters = {"plain": [], "suffix": [SuffixDrafter()], "wrong": [wrong]}[kind]
    drafters = [GuardedDrafter(drafter, VOCAB) for drafter in drafters]
    expected = make_engine(remembers_all()).generate("p", grammar=PERSON, sampling=sampling)
    engine = make_engine(remembers_all(), drafters)
    for _ in range(2):
        result = engine.generate("p", grammar=PERSON, sampling=sampling)
        assert set(json.loads(result.text)) == {"name", "born"}
        assert result.finish_reason == FinishReason.STOP
        assert [token.id for token in result.tokens] == [token.id for token in expected.tokens]
    if kind == "plain":
        assert not result.stats.drafters
    else:  # braces, keys and quotes are known beforehand
        assert result.stats.drafters["grammar"].draft_n_accepted >= 15
    if kind == "wrong":  # never scored
        assert "test" not in result.stats.drafters


def test_an_answer_without_a_grammar_follows_one_with_it(
    make_engine: Any, remembers_all: Any
) -> None:
    engine = make_engine(remembers_all(), [GuardedDrafter(SuffixDrafter(), VOCAB)])
    before = engine.generate("p", max_tokens=20).text
    engine.generate("p", grammar=PERSON)
    after = engine.generate("p", max_tokens=20)
    assert after.text == before and "grammar" not in after.stats.drafters


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("[a-c]{3}(x|yy)"), "[a-c]{3}(x|yy)"),
        (Grammar.lark('start: "a" tail\ntail: "b" | "c" tail'), "ac*b"),
        (Grammar.json_schema({"type": "boolean"}), "true|false"),
    ],
)
def test_other_forms(make_engine: Any, remembers_all: Any, grammar: Grammar, pattern: str) -> None:
    result = make_engine(remembers_all()).generate("p", grammar=grammar, max_tokens=60)
    assert result.finish_reason == FinishReason.LENGTH or re.fullmatch(pattern, result.text)
    assert result.text


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        (Grammar.json_schema({"type": "objekt"}), "type at #/type \\(Input should be 'null'"),
        (Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
        (Grammar.regex("a(b"), "unclosed group"),
        (Grammar.lark("start: other"), "other"),
    ],
    ids=str,
)
def test_what_no_answer_can_be_is_refused_and_nothing_is_disturbed(
    make_engine: Any, remembers_all: Any, grammar: Grammar, fault: str
) -> None:
    engine = make_engine(remembers_all())
    running = engine.generate("hello", max_tokens=5, stream=True)
    next(running)
    with pytest.raises(
        UsageError, match=f"(?s)(no answer can have this form|answers cannot be held).*{fault}"
    ):
        engine.generate("p", grammar=grammar)
    assert len(running.finish().tokens) == 5


def test_a_form_may_have_the_text_of_a_special_token(make_engine: Any, remembers_all: Any) -> None:
    """As a word of a schema, which the answer spells in other tokens."""
    word = "a<eos>b"
    for drafters in ([], [ForcedDrafter()]):
        engine = make_engine(remembers_all(), [GuardedDrafter(each, VOCAB) for each in drafters])
        result = engine.generate("p", grammar=Grammar.json_schema({"const": word}))
        assert json.loads(result.text) == word


def test_a_constraint_goes_ahead_along_draft_tokens_and_back(compiler: GrammarCompiler) -> None:
    """In whatever order paths are asked for, the answer is that of a fresh matcher."""
    rng = np.random.default_rng(0)
    paths = [list(TEXT[:length]) for length in rng.integers(0, len(TEXT), 30)]
    paths += [[*path[:-1], ord("x")] for path in paths if path]
    asked = compiler.compile(PERSON)
    for index in rng.permutation(len(paths)):
        path = paths[index]
        expected = compiler.compile(PERSON).allowed(path)
        assert (asked.allowed(path) == expected).all(), bytes(path)
        if bytes(path) == TEXT[: len(path)]:
            assert expected[TEXT[len(path)]] and not expected[ord("x")]
        else:
            assert expected.all()  # nothing after it is ever written


def test_a_constraint_moves_with_the_text(compiler: GrammarCompiler) -> None:
    asked = compiler.compile(PERSON)
    asked.allowed(TEXT[:9])  # ahead of what is then written
    asked.observe(TEXT[:5])
    assert asked.num_allowed(TEXT[5:]) == len(TEXT) - 5
    assert asked.num_allowed([*TEXT[5:9], ord("x"), *TEXT[9:]]) == 4
    asked.observe(TEXT[5:])
    assert np.flatnonzero(asked.allowed([])).tolist() == [EOS]
    asked.observe([EOS])
    with pytest.raises(UsageError, match="left the form"):
        compiler.compile(PERSON).observe(b"x")


def test_the_text_may_end_only_where_it_is_complete(compiler: GrammarCompiler) -> None:
    asked = compiler.compile(Grammar.regex("ab?"))
    assert not asked.allowed([])[EOS] and asked.num_allowed([EOS]) == 0
    assert asked.allowed(b"a")[EOS] and asked.allowed(b"a")[ord("b")]
    assert asked.num_allowed([ord("a"), EOS]) == 2
    assert asked.num_allowed([ord("a"), EOS, ord("b")]) == 2  # nothing follows the end


def test_what_is_forced_is_drafted_as_far_as_the_budget_goes(compiler: GrammarCompiler) -> None:
    from edge_spec.drafters.protocol import Budget

    sampler = Sampler(SamplingParams(), (), constraint=compiler.compile(PERSON))
    drafter = ForcedDrafter()
    assert len(drafter.propose(7, Budget(20, 20))) == 1
    drafter.begin([7], sampler)
    spelled = list(b'{"name": "A')
    assert drafter.propose(7, Budget(20, 20)).tokens.tolist() == [7, *spelled]
    assert drafter.propose(7, Budget(3, 20)).tokens.tolist() == [7, *spelled[:3]]


def test_draft_tokens_that_are_forbidden_are_cut_off(
    compiler: GrammarCompiler, make_tree: Any
) -> None:
    asked = compiler.compile(Grammar.regex("a(b|c)d"))
    chain = make_tree(7, list(b"abx"), [0, 1, 2])
    assert permitted(chain, asked).tokens.tolist() == [7, *b"ab"]
    branches = make_tree(7, list(b"axbycd"), [0, 0, 1, 2, 1, 5])
    left = permitted(branches, asked)
    assert left.tokens.tolist() == [7, *b"abcd"] and left.parents.tolist() == [-1, 0, 1, 1, 3]


def test_sampled_draft_tokens_are_never_cut_off_for_what_they_are(
    compiler: GrammarCompiler,
) -> None:
    """Dropping a sampled row for its own token would change the distribution of the text."""
    probs = np.full(VOCAB, 1 / VOCAB)
    tree = TokenTree(
        np.array([7, ord("x")], np.int32),
        np.array([-1, 0], np.int32),
        np.ones(2, np.float32),
        draft_probs=(None, probs),
    )
    assert permitted(tree, compiler.compile(PERSON)) is tree


class OnlyFew:
    """Three tokens of six, whatever came before."""

    def allowed(self, path: Sequence[int]) -> np.ndarray:
        return np.array([True, False, True, False, False, True])


def test_the_target_draws_from_what_is_allowed_in_its_own_proportions() -> None:
    """A draft that ignores the form is verified against what is left of the target's distribution.
    20,000 draws of 3 tokens: a total variation of 0.01 is three standard deviations."""
    from edge_spec.core.model import Forward
    from edge_spec.core.verify import verify

    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, (2, 6)).astype(np.float32)
    draft = rng.dirichlet(np.ones(6))
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5), (), 0.0, True, OnlyFew())  # type: ignore[arg-type]
    expected = np.where(OnlyFew().allowed([]), np.exp(logits[0].astype(np.float64)), 0)
    expected /= expected.sum()
    counts = np.zeros(6)
    for _ in range(20_000):
        candidate = sampler.draw(draft, Purpose.DRAFT)
        tree = TokenTree(
            np.array([0, candidate], np.int32),
            np.array([-1, 0], np.int32),
            np.ones(2, np.float32),
            draft_probs=(None, draft),
        )
        counts[verify(tree, Forward(logits), sampler).tokens[0]] += 1
        sampler.num_chosen += 1
    assert np.abs(counts / counts.sum() - expected).sum() / 2 < 0.01


def test_a_grammar_needs_llguidance_and_says_so(
    make_engine: Any, remembers_all: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(Exception, match=r'pip install -e "\.\[grammar\]"'):
        make_engine(remembers_all()).generate("p", grammar=PERSON)
