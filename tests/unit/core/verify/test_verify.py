"""Acceptance: verdicts over random trees, and the edges of numbers.

Distributions are tested in test_distribution.py and test_sampled_exact.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import Siblings, TokenTree, Verdict
from edge_spec.core.verify import verify
from fixtures.axes import pairwise

Rule = Callable[[TokenTree, Forward, Sampler], Verdict]
Context = tuple[int, ...]


@st.composite
def trees_and_logits(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens, parents and small integer logits, so that ties are common."""
    vocab = draw(st.integers(3, 8))
    rows = draw(st.integers(1, 12))
    parents = [draw(st.integers(0, row)) for row in range(rows - 1)]
    row_logits = st.lists(st.integers(-3, 3), min_size=vocab, max_size=vocab)
    logits = draw(st.lists(row_logits, min_size=rows, max_size=rows))
    # Half of the draft tokens are right, or paths would hardly go deep.
    right = [logits[parent].index(max(logits[parent])) for parent in parents]
    tokens = [draw(st.sampled_from([token, token, *range(vocab)])) for token in right]
    return tokens, parents, logits


@given(case=trees_and_logits())
def test_a_greedy_verdict_is_the_path_of_the_targets_choices(make_tree: Any, case: Any) -> None:
    tokens, parents, logits = case
    tree = make_tree(0, tokens, parents)
    sampler = Sampler(SamplingParams(), [0], tie_margin=0.5)  # of integer logits: equal ones
    verdict = verify(tree, Forward(np.array(logits, np.float32)), sampler)
    choice = [row.index(max(row)) for row in logits]
    path = [0, *verdict.accepted_rows]
    for parent, row in itertools.pairwise(path):
        assert tree.parents[row] == parent
        assert tree.tokens[row] == choice[parent]
    assert verdict.tokens == tuple(choice[row] for row in path)
    assert verdict.kept == tuple(path)
    children = tree.children(path[-1])
    assert all(tree.tokens[child] != choice[path[-1]] for child in children)
    assert verdict.exhausted == (not children)
    assert verdict.near_ties == sum(logits[row].count(max(logits[row])) > 1 for row in path)


@given(case=trees_and_logits(), seed=st.integers(0, 1000), top_k=st.integers(0, 4))
def test_a_sampled_verdict_is_what_plain_decoding_draws_at_each_position(
    make_tree: Any, case: Any, seed: int, top_k: int
) -> None:
    """So the token after the path comes from the residual: it is none of the rejected draft
    tokens."""
    tokens, parents, logits = case
    tree, out = make_tree(0, tokens, parents), Forward(np.array(logits, np.float32))
    sampler = Sampler(SamplingParams(temperature=1, top_k=top_k, seed=seed), [0])
    verdict = verify(tree, out, sampler)
    path = [0, *verdict.accepted_rows]
    assert tree.path(path[-1]) == path
    assert [int(tree.tokens[row]) for row in path[1:]] == list(verdict.tokens[:-1])
    for position, row in enumerate(path):
        drawn = sampler.choose(out.logits[row], verdict.tokens[:position]).token
        assert verdict.tokens[position] == drawn
    rejected = tree.tokens[tree.children(path[-1])]
    assert verdict.next_token not in rejected and verdict.exhausted == (len(rejected) == 0)


def test_verify_leaves_the_sampler_as_it_was() -> None:
    params = SamplingParams(temperature=1, seed=5, repetition_penalty=1.5)
    sampler, tree = Sampler(params, [0]), TokenTree.chain(0, [1, 2, 1])
    out = Forward(np.random.default_rng(0).normal(0, 1, (4, 3)).astype(np.float32))
    assert verify(tree, out, sampler) == verify(tree, out, sampler)


def test_penalties_reach_the_rows_below_a_draft_token() -> None:
    # Every row prefers token 1; once it is on the path the penalty turns the choice to 2.
    out = Forward(np.tile(np.array([0.0, 3.0, 2.0], np.float32), (4, 1)))
    sampler = Sampler(SamplingParams(presence_penalty=1.5), [0])
    verdict = verify(TokenTree.chain(0, [1, 2, 1]), out, sampler)
    assert verdict.tokens == (1, 2, 1, 1)  # 1 against 2: 3, 2; 1.5, 2; 1.5, 0.5; 1.5, 0.5


def sampled(
    draft_probs: np.ndarray, shape: tuple[int, ...], siblings: Siblings, seed: int
) -> TokenTree:
    """Samples of one distribution: as many below each last row as `shape` says."""
    tokens, parents, last = [0], [-1], 0
    random = np.random.default_rng(seed)
    chances = draft_probs.astype(np.float64) / draft_probs.sum(dtype=np.float64)
    for count in shape:
        again = siblings is not Siblings.WITHOUT_REPLACEMENT
        possible = count if again else min(count, int(np.count_nonzero(draft_probs)))
        tokens += random.choice(len(chances), possible, replace=again, p=chances).tolist()
        parents += [last] * possible
        last = len(tokens) - 1
    return TokenTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.ones(len(tokens), np.float32),
        (None, *[draft_probs] * (len(tokens) - 1)),
        siblings=siblings,
    )


def edge_of(kind: str, vocab: int, random: np.random.Generator) -> np.ndarray:
    """Draft probabilities that are hard on floating-point numbers."""
    probs = random.random(vocab)
    if kind == "zeros":
        probs[random.random(vocab) < 0.9] = 0
        probs[random.integers(vocab)] = 1
    elif kind == "tiny":  # what is left without the largest overflows any ratio
        probs *= 1e-300
        probs[random.integers(vocab)] = 1
    elif kind == "smallest":
        probs[:] = 5e-324
        probs[random.integers(vocab)] = 1
    elif kind == "one":
        probs[:] = 0
        probs[random.integers(vocab)] = 1
    probs /= probs.sum()
    return probs * (1 - 1e-12) if kind == "short" else probs


@pytest.mark.parametrize(
    ("kind", "vocab", "siblings", "dtype"),
    pairwise(
        ["zeros", "tiny", "smallest", "one", "short"],
        [2, 7, 50_000],
        list(Siblings),
        [np.float64, np.float32],
    ),
)
def test_no_edge_of_numbers_lets_an_impossible_token_through(
    vocab: int, siblings: Siblings, kind: str, dtype: Any
) -> None:
    """Nothing warns (warnings are errors), nothing fails, and nothing is written that the target
    would not write."""
    random = np.random.default_rng(vocab)
    for seed in range(3 if vocab > 100 else 40):
        draft_probs = edge_of(kind, vocab, random).astype(dtype)
        logits = random.normal(0, 30, (6, vocab)).astype(np.float32)  # up to e^-100
        likely = int(draft_probs.argmax())
        logits[:, likely] += random.choice([-1000, 0, 200])  # impossible, possible, certain
        params = SamplingParams(temperature=1, seed=seed, top_k=3 if seed % 2 else 0)
        sampler = Sampler(params, [0])
        for shape in ((1, 1, 1), (3,), (1, 2)):
            tree, out = sampled(draft_probs, shape, siblings, seed), Forward(logits)
            verdict = verify(tree, out, sampler)
            for row, token in zip((0, *verdict.accepted_rows), verdict.tokens, strict=True):
                assert sampler.probs(logits[row], [])[token] > 0


@pytest.mark.parametrize("siblings", Siblings)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3,), (2, 1)])
def test_greedy_text_does_not_change_with_sampled_draft_tokens(
    siblings: Siblings, shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    for seed in range(100):
        tree = sampled(edge_of("short", 4, random), shape, siblings, seed)
        out = Forward(random.normal(0, 1, (6, 4)).astype(np.float32))
        verdict = verify(tree, out, Sampler(SamplingParams(seed=seed), [0]))
        path = (0, *verdict.accepted_rows)
        assert verdict.tokens == tuple(int(out.logits[row].argmax()) for row in path)
        children = tree.children(path[-1])
        assert verdict.next_token not in tree.tokens[children]
        assert verdict.exhausted == (not children)


def test_a_draft_token_that_the_draft_could_not_have_made_is_refused() -> None:
    """So a draft whose probabilities were rounded to 0 is harmless."""
    logits = np.array([[0.0, 1.0, 2.0]] * 3, np.float32)
    for siblings, parents in itertools.product(Siblings, ([-1, 0, 1], [-1, 0, 0])):
        tree = TokenTree(
            np.array([0, 1, 1], np.int32),
            np.array(parents, np.int32),
            np.ones(3, np.float32),
            (None, *[np.array([0.5, 0.0, 0.5])] * 2),
            siblings=siblings,
        )
        verdict = verify(tree, Forward(logits), Sampler(SamplingParams(temperature=1, seed=1), []))
        assert verdict.accepted_rows == ()
