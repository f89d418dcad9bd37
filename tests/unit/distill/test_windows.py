"""Batches show a training what the target computed beside what it wrote next."""

from __future__ import annotations

import numpy as np

from edge_spec.distill.conversations import Conversation
from edge_spec.distill.features import Example
from edge_spec.distill.windows import Window, batch_of, in_batches, shuffled, windows_of

LAYERS, HIDDEN = 2, 3


def _example(num_tokens: int, start: int, first: int = 0) -> Example:
    """Feature k of token t is 10 * t + k."""
    tokens = np.arange(100, 100 + num_tokens, dtype=np.int32)
    rows = np.arange(first, num_tokens - 1)
    features = np.broadcast_to(
        (10 * rows[:, None] + np.arange(LAYERS))[..., None], (len(rows), LAYERS, HIDDEN)
    )
    return Example(Conversation(tokens, start, False), first, features.astype(np.float16))


def test_each_row_stands_beside_its_own_tokens() -> None:
    batch = batch_of([Window(_example(8, start=3, first=2), 1, 4)], num_positions=2)
    assert batch.features[0, :, 0, 0].tolist() == [30, 40, 50]
    assert batch.next_tokens.tolist() == [[104, 105, 106]]
    assert batch.written.tolist() == [[[105, 106], [106, 107], [107, -1]]]
    # The states of the rows, and of those after them, which say what was chosen there.
    assert batch.states[0, :, 0].tolist() == [31, 41, 51, 61, 0]
    assert batch.anchors.all() and batch.is_row.all()


def test_drafts_begin_in_the_answer_and_padding_is_none() -> None:
    windows = [Window(_example(8, start=3), 0, 7), Window(_example(5, start=2), 0, 4)]
    batch = batch_of(windows, num_positions=1)
    assert batch.anchors.tolist() == [
        [False, False, True, True, True, True, True],
        [False, True, True, True, False, False, False],
    ]
    assert batch.is_row[1].tolist() == [True] * 4 + [False] * 3


def test_windows_without_an_answer_are_left_out() -> None:
    found = windows_of([_example(20, start=9)], num_rows=4)
    assert [(each.begin, each.end) for each in found] == [(8, 12), (12, 16), (16, 19)]


def test_an_epoch_has_every_window_once_in_an_order_of_its_own() -> None:
    windows = windows_of([_example(20, start=1) for _ in range(9)], num_rows=8)
    epochs = [shuffled(windows, 32, seed=1, epoch=epoch) for epoch in (0, 1, 0)]
    ids = [[id(each) for batch in epoch for each in batch] for epoch in epochs]
    assert ids[0] == ids[2] != ids[1]
    assert sorted(ids[0]) == sorted(ids[1]) == sorted(map(id, windows))


def test_a_batch_is_no_wider_than_asked_but_for_one_window() -> None:
    windows = windows_of([_example(20, start=1) for _ in range(5)], num_rows=100)
    sizes = [len(batch) for batch in in_batches(windows, 40)]
    assert sizes == [2, 2, 1]
    assert [len(batch) for batch in in_batches(windows, 5)] == [1] * 5
