"""Pieces of examples, and batches of them in a fixed order: what a step of training reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.distill.acceptance import written_after
from edge_spec.distill.features import Example


@dataclass(frozen=True, eq=False)
class Window:
    """Rows of an example, at most as many as a batch is wide."""

    example: Example
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows beside each other, padded with zeros.

    features: [windows, rows, layers, hidden_size] float32, without the last layer's.
    states: [windows, rows + positions, hidden_size] float32, after the target's final norm.
    tokens: [windows, rows + positions] int64, the text that the states are of.
    next_tokens: [windows, rows] int64, the token after each row.
    written: [windows, rows, positions] int64, the tokens after that one; -1 where there are none.
    anchors: [windows, rows] bool, from which drafting may begin.
    is_row: [windows, rows] bool; else it is padding.
    """

    features: np.ndarray
    states: np.ndarray
    tokens: np.ndarray
    next_tokens: np.ndarray
    written: np.ndarray
    anchors: np.ndarray
    is_row: np.ndarray


def windows_of(examples: Sequence[Example], num_rows: int) -> list[Window]:
    """Returns the windows, without those that hold no anchor."""
    return [
        Window(each, begin, min(begin + num_rows, len(each.features)))
        for each in examples
        for begin in range(0, len(each.features), num_rows)
        if begin + num_rows > each.anchors[0]
    ]


def shuffled(
    windows: Sequence[Window], rows_a_batch: int, seed: int, epoch: int
) -> list[list[Window]]:
    """The same batches for one seed and epoch. Windows of like lengths stand together, so that
    little is padded."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(windows))
    lengths = np.array([windows[i].end - windows[i].begin for i in order])
    order = order[np.argsort(lengths // 32, kind="stable")]
    batches = list(in_batches([windows[i] for i in order], rows_a_batch))
    return [batches[i] for i in random.permutation(len(batches))]


def in_batches(windows: Sequence[Window], rows_a_batch: int) -> Iterator[list[Window]]:
    """Returns batches of about `rows_a_batch` rows each, padding included."""
    batch: list[Window] = []
    widest = 0
    for window in windows:
        widest = max(widest, window.end - window.begin)
        if batch and widest * (len(batch) + 1) > rows_a_batch:
            yield batch
            batch, widest = [], window.end - window.begin
        batch.append(window)
    if batch:
        yield batch


def batch_of(windows: Sequence[Window], num_positions: int) -> Batch:
    """num_positions: of draft tokens."""
    width = max(each.end - each.begin for each in windows)
    size = windows[0].example.features.shape[1:]
    count = len(windows)
    batch = Batch(
        features=np.zeros((count, width, size[0] - 1, size[1]), np.float32),
        states=np.zeros((count, width + num_positions, size[1]), np.float32),
        tokens=np.zeros((count, width + num_positions), np.int64),
        next_tokens=np.zeros((count, width), np.int64),
        written=np.full((count, width, num_positions), -1, np.int64),
        anchors=np.zeros((count, width), bool),
        is_row=np.zeros((count, width), bool),
    )
    for at, each in enumerate(windows):
        _fill(batch, at, each, num_positions)
    return batch


def _fill(batch: Batch, at: int, window: Window, num_positions: int) -> None:
    example, length = window.example, window.end - window.begin
    rows = example.features[window.begin : window.end + num_positions]
    batch.features[at, :length] = rows[:length, :-1]
    batch.states[at, : len(rows)] = rows[:, -1]
    places = example.first + np.arange(window.begin, window.end)
    tokens = example.conversation.tokens
    read = tokens[places[0] : places[0] + length + num_positions]
    batch.tokens[at, : len(read)] = read
    batch.next_tokens[at, :length] = tokens[places + 1]
    batch.written[at, :length] = written_after(tokens, places, num_positions)
    batch.anchors[at, :length] = np.arange(window.begin, window.end) >= example.anchors[0]
    batch.is_row[at, :length] = True
