"""Jacobi blocks against a plain reimplementation, and that no text changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.modes import JacobiInit
from edge_spec.core.tree import likeliest
from edge_spec.drafters.jacobi import Filler, JacobiDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.testing import NextLogits, ScriptedModel
from fixtures.greedy_rounds import models, prompts, rounds

AMPLE = Budget(num_draft_tokens=50, num_rows=50)


budgets = st.builds(
    lambda **limits: Budget(**limits),  # of a tuple, hypothesis would draw all fields
    num_draft_tokens=st.integers(0, 6),
    num_rows=st.integers(1, 7),
    branches=st.booleans(),
)


@given(
    model=models,
    prompt=prompts,
    block=st.integers(1, 6),
    fill=st.sampled_from(JacobiInit),
    limits=st.lists(budgets, min_size=10, max_size=10),
)
def test_draft_tokens_are_the_argmax_of_the_round_before(
    model: ScriptedModel, prompt: list[int], block: int, fill: JacobiInit, limits: list[Budget]
) -> None:
    """Every draft token by its position in the text: refined where the row before it was scored."""
    filler = Filler(fill, seed=3)
    filler.begin(prompt)
    known: dict[int, int] = {}
    made = rounds(JacobiDrafter(fill, block, seed=3), model, prompt, limits)
    for budget, (text, tree, _, verdict, _) in zip(limits, made, strict=True):
        count = max(0, min(block, budget.num_draft_tokens, budget.num_rows - 1))
        places = range(len(text), len(text) + count)
        missing = [place for place in places if place not in known]
        ahead = [known[place] for place in sorted(known)]
        known |= zip(missing, filler.fill(ahead, len(missing)), strict=True)
        assert tree.is_chain and tree.tokens.tolist() == [text[-1], *(known[p] for p in places)]
        # All of it is scored: what it teaches is worth more than its chance.
        assert len(tree) == 1 or tree.required == (True,) * len(tree)
        assert likeliest(tree, 64, 0.99) is tree
        refined = {}
        for place in places:
            path = (*text, *(known[p] for p in places if p <= place))
            refined[place + 1] = int(model.next_logits(path).argmax())
        known |= refined
        known = {p: known[p] for p in known if p >= len(text) + len(verdict.tokens)}
        filler.extend(verdict.tokens)


def written(position_logits: NextLogits, count: int, **options: Any) -> list[int]:
    """Tokens accepted in each round."""
    drafter = JacobiDrafter(**options)
    made = rounds(drafter, ScriptedModel(position_logits, 64), [40, 41, 42], [AMPLE] * count)
    return [each.verdict.num_accepted for each in made]


def constant(tokens: tuple[int, ...]) -> np.ndarray:
    logits = np.zeros(64, np.float32)
    logits[7] = 5.0
    return logits


@pytest.mark.parametrize("fill", [JacobiInit.NGRAM, JacobiInit.REPEAT_LAST])
def test_a_constant_text_is_accepted_whole_from_the_second_round_on(fill: JacobiInit) -> None:
    assert written(constant, 6, fill=fill, block=5) == [0, 5, 5, 5, 5, 5]
