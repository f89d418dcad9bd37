"""Which slots a session's tokens have, and what masks show of them."""

from __future__ import annotations

import numpy as np

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.static.slots import MASKED, Slots

SEES_ITSELF = np.ones((1, 1), bool)


def shown(mask: np.ndarray) -> list[list[int]]:
    """The slots that each row of a mask sees; all others are masked."""
    assert mask.dtype == np.float16 and mask.shape[:2] == (1, 1)
    assert set(np.unique(mask).tolist()) <= {0.0, MASKED}
    return [np.flatnonzero(row == 0).tolist() for row in mask[0, 0]]


def slots(*taken: int, size: int = 12) -> Slots:
    found = Slots(size)
    found.take(taken)
    return found


def test_rows_see_committed_tokens_their_ancestors_and_nothing_in_holes() -> None:
    cache = slots(0, 1, 4)
    tree = TokenTree(np.zeros(4, np.int32), np.array([-1, 0, 1, 0], np.int32), np.ones(4))
    assert shown(cache.mask(tree.ancestors, 4)) == [
        [0, 1, 4, 5],
        [0, 1, 4, 5, 6],
        [0, 1, 4, 5, 6, 7],
        [0, 1, 4, 5, 8],
    ]


def test_padding_sees_itself() -> None:
    assert shown(slots(0, 1).mask(SEES_ITSELF, 4)) == [[0, 1, 2], [3], [4], [5]]
    assert shown(slots().mask(SEES_ITSELF, 2)) == [[0], [1]]


def test_a_mask_reaches_the_last_slot() -> None:
    cache = slots(*range(10))
    assert cache.fits(2) and not cache.fits(3)
    assert shown(cache.mask(np.tri(2, dtype=bool), 2)) == [[*range(11)], [*range(12)]]


def test_forgotten_tokens_are_masked_and_their_slots_written_again() -> None:
    cache = slots(0, 2, 5, 6)
    cache.forget(2)
    assert (len(cache), cache.end, cache.has_holes) == (2, 3, True)
    cache.take([3, 4])
    assert shown(cache.mask(SEES_ITSELF, 1)) == [[0, 2, 3, 4, 5]]
    cache.forget(0)
    assert (len(cache), cache.end, cache.has_holes) == (0, 0, False)


def test_compaction_moves_what_is_taken_to_the_front_of_every_layer_and_head() -> None:
    cache = slots(1, 2, 5, 7, size=8)
    state = np.arange(2 * 3 * 8 * 2).reshape(2, 3, 8, 2)
    before = state.copy()
    moved = cache.compacted(state, axis=2)
    np.testing.assert_array_equal(moved[:, :, :4], before[:, :, [1, 2, 5, 7]])
    np.testing.assert_array_equal(state, before)
    cache.compact()
    assert (len(cache), cache.end, cache.has_holes) == (4, 4, False)
    assert shown(cache.mask(SEES_ITSELF, 1)) == [[0, 1, 2, 3, 4]]
