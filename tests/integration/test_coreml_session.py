"""Sessions on Core ML packages, run in numpy, do what the reference session does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.coreml.native import OpenedPackage
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.static.session import Program, StaticSession
from fixtures.coreml_in_numpy import NumpyProgram, open_in_numpy, program_of

CONTEXT = 100  # tokens, of `packaged`; 128 slots
# Logits have a standard deviation of 2 to 3, and one wrong token moves them by 1 to 10. Float16
# everywhere makes 0.04 of that beside float32; two ways to score the same row make 0.01.
TOLERANCE, OWN_TOLERANCE = 0.15, 0.05

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


class Watched:
    """A program that remembers which functions ran and where they wrote, and can be made to fail
    at its next pass or its next move of a state."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.runs: list[tuple[str, int]] = []
        self.moves = 0
        self.failing = ""  # "predict" or "write_state"

    def make_state(self) -> Any:
        return self._program.make_state()

    def predict(
        self,
        function: str,
        inputs: Mapping[str, np.ndarray],
        state: Any,
    ) -> Mapping[str, np.ndarray]:
        self.runs.append((function, int(inputs["write_slot"][0])))
        found = self._program.predict(function, inputs, state)
        self._fail_in("predict")  # once everything is written
        return found

    def read_state(self, state: Any, name: str) -> np.ndarray:
        return self._program.read_state(state, name)

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None:
        self.moves += 1
        if name == "values":
            self._fail_in("write_state")
        self._program.write_state(state, name, value)

    def _fail_in(self, call: str) -> None:
        if self.failing == call:
            self.failing = ""
            raise SessionError("it failed", remedy="Try again.")


@pytest.fixture(scope="module")
def program(packaged: Callable[..., Bundle]) -> NumpyProgram:
    return program_of(OpenedPackage.of(packaged("llama")))


@pytest.fixture
def watched(program: NumpyProgram) -> Watched:
    return Watched(program)


@pytest.fixture
def both(
    watched: Watched,
    packaged: Callable[..., Bundle],
    checkpoint: Callable[..., Any],
    side_by_side: ModuleType,
) -> Any:
    """A session of a watched program, and one of the reference."""
    layout = OpenedPackage.of(packaged("llama")).layout
    session = StaticSession(watched, layout, CONTEXT)
    reference = ReferenceModel(checkpoint("llama"), CONTEXT).open_session()
    return side_by_side.Both((session, reference), TOLERANCE)


def star(tokens: list[int]) -> TokenTree:
    """All rows hang below row 0: to keep the last one leaves a hole of all others."""
    parents = np.array([-1, *(0 for _ in tokens[1:])], np.int32)
    return TokenTree(np.array(tokens, np.int32), parents, np.ones(len(tokens), np.float32))


def test_slots_that_run_out_are_made_free(both: Any, watched: Watched, tokens: Tokens) -> None:
    """Two tokens a round, in 8 slots."""
    for seed in range((CONTEXT - 8) // 2):
        both.forward(star(tokens(8, seed)))
        both.commit([0, 7])
    assert watched.moves >= 4  # of two states
    assert max(slot for _, slot in watched.runs) == 120
    both.forward(star(tokens(8, seed=500)))


def test_a_pass_that_fails_leaves_the_session_usable(
    both: Any, watched: Watched, tokens: Tokens, random_tree: RandomTree
) -> None:
    both.prefill(tokens(10))
    for attempt in ("forward", "prefill"):
        watched.failing = "predict"
        with pytest.raises(SessionError):
            if attempt == "forward":
                both.sessions[0].forward(random_tree(8, seed=9))
            else:
                both.sessions[0].prefill(tokens(6, seed=9))
        assert both.length == 10
    both.chain(tokens(4))
    both.commit(range(2))
    both.chain(tokens(4, seed=1))


def test_a_move_that_fails_leaves_the_session_usable(
    both: Any, watched: Watched, tokens: Tokens
) -> None:
    for seed in range(16):
        both.forward(star(tokens(8, seed)))
        both.commit([0, 7])
    watched.failing = "write_state"
    with pytest.raises(SessionError):
        both.sessions[0].forward(star(tokens(8)))
    assert watched.moves == 2  # of which the second failed
    both.chain(tokens(8))
    assert watched.moves == 4


def test_hidden_states_come_where_they_were_exported(
    checkpoint: Callable[..., Any], tmp_path: Any, side_by_side: ModuleType, tokens: Tokens
) -> None:
    options = ExportOptions("fp16", context_length=CONTEXT, check=False, hidden_states=True)
    exporter = runtimes.load_exporter("coreml")
    exporter.export(checkpoint("llama"), tmp_path / "out", options, lambda what, fraction: None)
    model = open_in_numpy(open_bundle(tmp_path / "out"))
    assert model.capabilities.hidden_states
    session = model.open_session()
    assert session.forward(TokenTree.chain(1, tokens(2))).hidden is not None
    reference = ReferenceModel(checkpoint("llama"), CONTEXT).open_session()
    side_by_side.Both((session, reference), TOLERANCE).chain(tokens(5))
