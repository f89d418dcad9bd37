"""Lookahead against its definition: the window's shape, how it moves on, and what it harvests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.tree import TokenTree
from edge_spec.drafters.jacobi import LookaheadDrafter, WindowSize
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import UsageError
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, random_logits
from fixtures.greedy_rounds import models, prompts, rounds

AMPLE = Budget(num_draft_tokens=100, num_rows=100)
NO_WINDOW = Budget(num_draft_tokens=100, num_rows=100, branches=False, probes=False)

Cells = dict[tuple[int, int], int]  # the window's tokens by row and by position in the text


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["", "3", "3,3", "3,3,3,3", "a,b,c", "3;3;3", "3,3,", "1.5,3,3", "9" * 5000], "no size"),
        (["0,3,3", "-1,3,3", "3,1,3", "3,0,3", "3,3,0", "3,3,-2"], "is too small"),
    ],
)
def test_what_is_no_size_is_refused(texts: list[str], why: str) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=f"{why}"):
            WindowSize.parse(text)


def follow(tree: TokenTree, path: Sequence[int]) -> int | None:
    """The row that a path of tokens leads to."""
    row = 0
    for token in path:
        below = [child for child in tree.children(row) if tree.tokens[child] == token]
        if not below:
            return None
        row = below[0]
    return row


def path_below(levels: Sequence[Sequence[int]], column: int) -> list[int]:
    """From the pending token to the last row of a column."""
    return [*levels[0][1 : column + 1], *(level[column] for level in levels[1:])]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_the_window_is_a_tree_of_lookaheads_shape(width: int, ngram: int) -> None:
    num_levels = ngram - 1
    drafter = LookaheadDrafter(WindowSize(width, ngram, 2))
    drafter.begin([0])
    levels = np.arange(num_levels * width).reshape(num_levels, width)  # all tokens differ
    drafter._levels = levels.tolist()
    tree = drafter.propose(0, AMPLE)
    assert len(tree) == num_levels * width
    cell = {int(token): divmod(row, width) for row, token in enumerate(levels.ravel())}
    cells = [cell[token] for token in tree.tokens.tolist()]
    place = {each: row for row, each in enumerate(cells)}
    for row, (r, j) in enumerate(cells):
        above = (r - 1, j) if r else (0, j - 1)
        assert tree.parents[row] == (-1 if (r, j) == (0, 0) else place[above])
        assert tree.depths[row] == j + r
        for other, (s, k) in enumerate(cells):
            # `j_make_causal_mask_multilevel`: row 0 is causal; the other rows see row 0 up to
            # their column, and of the rows up to their own their column.
            sees = k <= j if s == 0 else (k == j and s <= r)
            assert tree.ancestors[row, other] == sees
    assert tree.required == (() if len(tree) == 1 else (False, *(True,) * (len(tree) - 1)))
    assert tree.proposed_by == ("", *["lookahead"] * (len(tree) - 1))


sizes = st.builds(
    WindowSize, width=st.integers(1, 4), ngram=st.integers(2, 4), draft_tokens=st.integers(1, 4)
)
budgets = st.builds(
    lambda **limits: Budget(**limits),  # of a tuple, hypothesis would draw all fields
    num_draft_tokens=st.integers(0, 9),
    num_rows=st.integers(1, 24),
    branches=st.booleans(),
)


def cells_of(levels: Sequence[Sequence[int]], pending_at: int, oldest: int = 0) -> Cells:
    """oldest: rows that have gone, which stood where row 0 stands now."""
    return {
        (r - oldest, pending_at + j + r): token
        for r, level in enumerate(levels)
        for j, token in enumerate(level)
    }


def latest(added: Sequence[Sequence[int]], first: int, count: int) -> list[tuple[int, ...]]:
    """What followed a token in the last `count` different n-grams, the latest first."""
    rests = [tuple(each[1:]) for each in reversed(added) if each[0] == first]
    return list(dict.fromkeys(rests))[:count]


@given(
    model=models,
    prompt=prompts,
    size=sizes,
    limits=st.lists(st.sampled_from([AMPLE]) | budgets, min_size=12, max_size=12),
)
def test_a_window_moves_on_and_is_harvested_as_defined(
    model: ScriptedModel, prompt: list[int], size: WindowSize, limits: list[Budget]
) -> None:
    drafter = LookaheadDrafter(size, seed=1)
    added = [prompt[i : i + size.ngram] for i in range(len(prompt) - size.ngram + 1)]
    made = rounds(drafter, model, prompt, limits, lambda each: [*map(list, each._levels)])
    for budget, (text, tree, _, verdict, levels) in zip(limits, made, strict=True):
        after = [*text, *verdict.tokens]
        paths = [path_below(levels, column) for column in range(size.width)]
        scored = all(follow(tree, path) is not None for path in paths)
        if (
            budget.branches
            and size.width + len(levels) - 2 <= budget.num_draft_tokens
            and size.width * len(levels) <= budget.num_rows
        ):
            assert scored
        start = max(0, len(text) - size.ngram + 1)
        added += [after[i : i + size.ngram] for i in range(start, len(after) - size.ngram + 1)]
        gone = 0
        if scored:
            newest = [int(model.next_logits((*text, *path)).argmax()) for path in paths]
            levels = [[text[-1], *levels[0][1:]], *levels[1:], newest]
            if len(levels) == size.ngram:
                added += map(list, zip(*levels, strict=True))
                levels, gone = levels[1:], 1
        # Of a cell (r, j) the position is that of the pending token and j + r.
        before = cells_of(levels, len(text) - 1 + gone)
        now = cells_of(drafter._levels, len(after) - 1)
        assert len(now) == len(before)
        assert now.pop((0, len(after) - 1)) == after[-1]
        for place, token in now.items():
            assert token == before[place] if place in before else token in after
        for first in range(8):
            assert drafter._pool.after(first) == latest(added, first, size.draft_tokens)


def step(tokens: tuple[int, ...]) -> int:
    return tokens[-1] + 1


def step_by_two(tokens: tuple[int, ...]) -> int:
    """Counts on too, but by 2 after a larger token: a function of the last two."""
    return tokens[-1] + 1 + (len(tokens) > 1 and tokens[-2] > tokens[-1])


@pytest.mark.parametrize("rule", [step, step_by_two])
def test_the_window_finds_what_the_text_has_not_said_yet(decode: Any, rule: Any) -> None:
    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(120, np.float32)
        logits[rule(tokens) % 120] = 5.0
        return logits

    model, prompt = ScriptedModel(next_logits, 120), [90, 60, 50, 40, 30, 20, 10, 0]
    sized = FixedPolicy(max_draft_tokens=40)
    run = decode(
        model, prompt, [LookaheadDrafter(WindowSize(5, 4, 5))], max_tokens=80, policy=sized
    )
    text = [*prompt, *run.tokens]
    said = [set(pairwise(text[:i])) for i in range(len(text))]
    foreseen = [
        (text[i - 1], text[i])
        for i, token in enumerate(run.decoded, start=len(prompt))
        if token.drafter and (text[i - 1], text[i]) not in said[i]
    ]
    assert len(foreseen) >= 4
    # No text says anything twice here: without its window, nothing is known.
    chains = FixedPolicy(branches=False, probes=False)
    plain = decode(
        model, prompt, [LookaheadDrafter(WindowSize(5, 4, 5))], max_tokens=80, policy=chains
    )
    assert plain.tokens == run.tokens
    assert not any(each.num_accepted for each in plain.rounds)


def test_a_window_that_does_not_fit_is_left_out_and_comes_back(decode: Any, greedy: Any) -> None:
    model = ScriptedModel(random_logits(30), 30)
    # Too shallow, too few rows, no branches.
    limits = [AMPLE] * 5 + [Budget(1, 9)] * 5 + [Budget(50, 8)] * 5 + [NO_WINDOW] * 5 + [AMPLE] * 5
    drafter = LookaheadDrafter(WindowSize(3, 4, 3))
    made = list(rounds(drafter, model, [1, 2, 3], limits))
    needed = [any(each.tree.required) for each in made]
    assert needed == [True] * 5 + [False] * 15 + [True] * 5
    assert [token for each in made for token in each.verdict.tokens] == greedy(
        model, [1, 2, 3], sum(len(each.verdict.tokens) for each in made)
    )
