"""Scores a text with a written package in numpy: what was written is checked on any system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import coremltools as ct
import numpy as np

from edge_spec.exporters.coreml.constants import Constants
from edge_spec.exporters.coreml.interpreter import Interpreted, interpret
from edge_spec.exporters.coreml.package import read_function
from edge_spec.exporters.static_layout import MASKED, SCORING_ROWS, functions


def scored_in_numpy(
    package: Path, vocab_size: int, slots: int
) -> Callable[[Sequence[int], Callable[[float], None]], np.ndarray]:
    """Returns what scores a text (see `exporters.parity.Score`).

    slots: of the package's cache. What is returned raises UnsupportedModelError for a program
    that this exporter does not write, and SessionError where one cannot be evaluated.
    """

    def score(tokens: Sequence[int], on_chunk: Callable[[float], None]) -> np.ndarray:
        specification = ct.models.utils.load_spec(str(package))
        names = {each.rows: each.name for each in functions() if each.scores}
        planned: dict[int, Interpreted] = {}
        constants = Constants()
        described = specification.description.functions[0].state
        state = {
            each.name: np.zeros(tuple(each.type.stateType.arrayType.shape), np.float32)
            for each in described
        }
        count = len(tokens) - 1
        scores = np.empty((count, vocab_size), np.float32)
        for start in range(0, count, max(SCORING_ROWS)):
            chunk = tokens[start : min(start + max(SCORING_ROWS), count)]
            rows = next(each for each in SCORING_ROWS if each >= len(chunk))
            if rows not in planned:
                function = read_function(package, specification, names[rows])
                planned[rows] = interpret(function, constants)
            found = planned[rows].run(_inputs(chunk, rows, start, slots), state)
            parts = [value for name, value in found.items() if name.startswith("logits")]
            end = start + len(chunk)
            scores[start:end] = np.concatenate(parts, axis=1)[: len(chunk)]
            on_chunk(end / count)
        return scores

    return score


def _inputs(chunk: Sequence[int], rows: int, start: int, slots: int) -> dict[str, np.ndarray]:
    """Returns those of a pass over a chain that begins at `start` and is padded to `rows`."""
    ids = np.zeros((1, rows), np.int32)
    ids[0, : len(chunk)] = chunk
    positions = np.zeros(rows, np.int32)
    positions[: len(chunk)] = start + np.arange(len(chunk))
    sees = np.arange(slots) <= start + np.arange(rows)[:, None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "write_slot": np.array([start], np.int32),
        "mask": np.where(sees, 0, MASKED).astype(np.float16)[None, None],
    }
