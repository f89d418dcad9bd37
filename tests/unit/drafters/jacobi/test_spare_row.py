"""The row that a padded plain step takes anyway, filled by what the target said after a wrong
token."""

from __future__ import annotations

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.jacobi.jacobi import SpareRowDrafter
from edge_spec.drafters.protocol import Budget

VOCAB = 9
PADDED = Budget(num_draft_tokens=4, num_rows=5, free_rows=2)


def scored(*argmaxes: int) -> Forward:
    return Forward(np.eye(VOCAB, dtype=np.float32)[list(argmaxes)])


def verdict(*tokens: int) -> Verdict:
    """All of a chain are right but the last, which the target has chosen."""
    return Verdict(tokens, accepted_rows=tuple(range(1, len(tokens))), exhausted=False)


def drafted(drafter: SpareRowDrafter, pending: int, budget: Budget = PADDED) -> list[int]:
    return list(drafter.propose(pending, budget).tokens[1:])


def begun() -> SpareRowDrafter:
    drafter = SpareRowDrafter()
    drafter.begin([1, 2])
    return drafter


def test_what_follows_a_wrong_token_is_the_next_draft_token() -> None:
    drafter = begun()
    tree = TokenTree.chain(2, [5, 6])  # of another drafter
    drafter.observe(tree, scored(3, 7, 8), verdict(3))  # 5 was wrong: after it comes 7
    assert drafted(drafter, 3) == [7]
    drafter.observe(TokenTree.chain(3, [7]), scored(7, 4), verdict(7, 4))  # 7 was right
    assert len(drafted(drafter, 4)) == 1  # any token, so that its row makes the next one
    drafter.observe(TokenTree.chain(4, [4]), scored(1, 6), verdict(1))
    assert drafted(drafter, 1) == [6]


def test_nothing_is_drafted_where_a_row_costs_something_or_none_is_left() -> None:
    drafter = begun()
    drafter.observe(TokenTree.chain(2, [5]), scored(3, 7), verdict(3))
    assert drafted(drafter, 3, Budget(num_draft_tokens=4, num_rows=5)) == []
    assert drafted(drafter, 3, Budget(num_draft_tokens=0, num_rows=5, free_rows=2)) == []
    assert drafted(drafter, 3, Budget(num_draft_tokens=4, num_rows=1, free_rows=2)) == []
    assert drafted(drafter, 3) == [7]


def test_another_text_begins_without_a_guess() -> None:
    drafter = begun()
    drafter.observe(TokenTree.chain(2, [5]), scored(3, 7), verdict(3))
    drafter.begin([1, 3])
    assert drafted(drafter, 3) == [3]


def test_its_confidence_follows_what_became_of_its_tokens() -> None:
    drafter, confidences = begun(), []
    for _ in range(40):
        drafter.observe(TokenTree.chain(2, [5]), scored(3, 7), verdict(3))
        tree = drafter.propose(3, PADDED)
        confidences.append(float(tree.confidence[1]))
        drafter.observe(tree, scored(7, 1), verdict(7, 1))
    assert confidences[-1] > 0.5 > 0.2 > confidences[0]
