"""The session of a Core ML package asks for the passes that docs/vectors/coreml.json expects.

Those were written down by code of their own (tests/fixtures/coreml_slots.py). What runs a pass is
replaced by a record of it; its states hold the number of each slot, so that a move shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.static.session import Layout, PassShape, StaticSession

VECTORS = Path(__file__).parents[2] / "docs" / "vectors"
CASES = json.loads((VECTORS / "coreml.json").read_text("utf-8"))["cases"]
ROWS = {"rows_1": 1, "rows_4": 4, "rows_8": 8, "prefill_64": 64}
STATES = ("keys", "values")


class Recorded:
    """A program that computes nothing."""

    def __init__(self, slots: int) -> None:
        self.passes: list[dict[str, Any]] = []
        self._numbers = np.arange(slots, dtype=np.float16).reshape(1, 1, slots, 1)
        self._moved: dict[str, list[int]] = {}

    def make_state(self) -> dict[str, np.ndarray]:
        return {name: self._numbers.copy() for name in STATES}

    def read_state(self, state: dict[str, np.ndarray], name: str) -> np.ndarray:
        return state[name].copy()

    def write_state(self, state: dict[str, np.ndarray], name: str, value: np.ndarray) -> None:
        self._moved[name] = value.ravel().astype(int).tolist()

    def predict(
        self,
        function: str,
        inputs: Mapping[str, np.ndarray],
        state: Any,
    ) -> Mapping[str, np.ndarray]:
        rows = ROWS[function]
        mask = inputs["mask"]
        assert mask.shape == (1, 1, rows, self._numbers.size) and mask.dtype == np.float16
        assert set(np.unique(mask)) == {np.float16(0), np.float16(-30000)}
        assert {name: array.dtype for name, array in inputs.items() if name != "mask"} == {
            "input_ids": np.int32,
            "position_ids": np.int32,
            "write_slot": np.int32,
        }
        self.passes.append(
            {
                "function": function,
                "moved_from": [self._moved.pop(name) for name in STATES] if self._moved else None,
                "input_ids": inputs["input_ids"].tolist(),
                "position_ids": inputs["position_ids"].tolist(),
                "write_slot": inputs["write_slot"].tolist(),
                "visible": [np.flatnonzero(row == 0).tolist() for row in mask[0, 0]],
            }
        )
        return {"logits": np.zeros((rows, 1), np.float16)}


def slots_of(ranges: list[list[int]]) -> list[int]:
    return [slot for first, end in ranges for slot in range(first, end)]


def expected(described: dict[str, Any]) -> dict[str, Any]:
    moved = described["moved_from"]
    return described | {
        "moved_from": None if moved is None else [slots_of(moved)] * len(STATES),
        "input_ids": [described["input_ids"]],
        "write_slot": [described["write_slot"]],
        "visible": [slots_of(ranges) for ranges in described["visible"]],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_sessions_passes_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    program = Recorded(case["slots"])
    shapes = [
        PassShape(name, rows, () if name == "prefill_64" else ("logits",), False)
        for name, rows in ROWS.items()
    ]
    layout = Layout(tuple(shapes), case["slots"], STATES)
    session = StaticSession(program, layout, case["context"])
    for call in case["calls"]:
        program.passes.clear()
        if call["call"] == "forward":
            rows = len(call["tokens"])
            tokens, parents = np.array([call["tokens"], call["parents"]], np.int32)
            session.forward(TokenTree(tokens, parents, np.ones(rows, np.float32)))
        else:
            argument = {"prefill": "tokens", "commit": "rows", "rollback": "length"}[call["call"]]
            getattr(session, call["call"])(call[argument])
        for found, described in zip(program.passes, call["passes"], strict=True):
            if found["moved_from"] is not None:
                used = len(slots_of(described["moved_from"]))
                found["moved_from"] = [moved[:used] for moved in found["moved_from"]]
            assert found == expected(described)
        assert session.length == len(slots_of(call["slots"]))
