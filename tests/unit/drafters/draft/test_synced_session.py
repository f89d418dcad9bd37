"""A session kept in step with a text: it scores what follows that, and reads nothing twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Capabilities, Forward, require_rollback
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.draft.synced_session import MAX_CATCH_UP, SyncedSession
from edge_spec.errors import ContextFullError
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits
from fixtures.counting_session import CountingSession

VOCAB = 12
TEXT = [3, 1, 4, 1, 5]
CONTEXT = 64


class Target(ScriptedSession):
    """A session whose cache a part of its model shares."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.passes = 0

    def forward(self, tree: TokenTree) -> Forward:
        self.passes += 1
        return super().forward(tree)


class SharedSession(CountingSession):
    """Reads what its target has committed, and writes after it; each pass of the target leaves
    other tokens there."""

    def __init__(self, model: ScriptedModel, target: Target) -> None:
        super().__init__(model)
        self._target = target
        self._length = 0
        self._seen = target.passes

    @property
    def length(self) -> int:
        return self._length

    def prefill(self, tokens: Sequence[int]) -> None:
        self._claim()
        super().prefill(tokens)
        self._length = len(self.committed)

    def forward(self, tree: TokenTree) -> Forward:
        self._claim()
        return super().forward(tree)

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self._length = len(self.committed)

    def rollback(self, length: int) -> None:
        require_rollback(max(self._length, self._target.length), length)
        self._length = length

    def _claim(self) -> None:
        assert self._length >= self._target.length, "a pass would overwrite what the target holds"
        behind = self.committed[self._target.length : self._length]
        if self._seen != self._target.passes:
            self._seen, behind = self._target.passes, [0] * len(behind)
        self.committed = [*self._target.committed, *behind]


def model_of(max_rows: int = 64, context_length: int = CONTEXT) -> ScriptedModel:
    """Every token so far decides the next: any wrong one in a cache shows."""
    model = ScriptedModel(random_logits(VOCAB, order=10_000), VOCAB, context_length)
    model.capabilities = Capabilities(max_rows, trees=True, rollback=True, hidden_states=False)
    return model


class Follower:
    """An InStep and, beside it, the tokens that it should follow."""

    def __init__(self, shared: bool = False, max_rows: int = 64, context: int = CONTEXT) -> None:
        self.model = model_of(max_rows, context)
        self.target = Target(self.model)
        self.session = (
            SharedSession(self.model, self.target) if shared else CountingSession(self.model)
        )
        self.in_step = SyncedSession(self.session, context, max_rows, shared)
        self.text: list[int] = []
        self.draft_tokens: list[int] = []

    def begin(self, text: Sequence[int]) -> None:
        self._write([*text])
        self.in_step.begin(text)

    def extend(self, tokens: Sequence[int]) -> None:
        self._write([*self.text, *tokens])
        self.in_step.extend(tokens)

    def candidate(self, tokens: Sequence[int]) -> None:
        self.in_step.candidate(tokens)
        self.draft_tokens += tokens

    def retract(self, keep: int) -> None:
        self.in_step.retract(keep)
        del self.draft_tokens[keep:]

    def score(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> TokenTree:
        """Checks every row against the model itself."""
        followed = [*self.text, *self.draft_tokens]
        assert (self.in_step.last, self.in_step.draft_tokens) == (followed[-1], self.draft_tokens)
        tree = TokenTree(
            np.array([followed[-1], *tokens], np.int32),
            np.array([-1, *parents], np.int32),
            np.ones(1 + len(tokens), np.float32),
        )
        logits = self.in_step.score(tree)
        assert logits.shape == (len(tree), VOCAB)
        for row in range(len(tree)):
            path = tree.tokens[tree.path(row)].tolist()
            expected = self.model.next_logits((*followed[:-1], *path))
            np.testing.assert_array_equal(logits[row], expected)
        return tree

    def _write(self, text: list[int]) -> None:
        """The target holds all of its text but the last token, and has scored rows after it."""
        self.text, self.draft_tokens = text, []
        self.target.rollback(0)
        self.target.prefill(text[:-1])
        self.target.forward(TokenTree.chain(text[-1]))


@given(seed=st.integers(0, 10_000), shared=st.booleans(), max_rows=st.sampled_from([3, 8, 64]))
def test_whatever_happens_rows_are_scored_behind_the_text_and_the_draft_tokens(
    seed: int, shared: bool, max_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    follower = Follower(shared, max_rows)
    follower.begin(TEXT)

    def some(least: int, most: int) -> list[int]:
        return rng.integers(0, 3, rng.integers(least, most + 1)).tolist()  # often what it was

    for _ in range(12):
        match rng.integers(6):
            case 0:
                follower.extend(some(1, 3))
            case 1:
                follower.candidate(some(1, 3))
            case 2:
                follower.retract(int(rng.integers(0, len(follower.draft_tokens) + 1)))
            case 3:
                follower.begin([*follower.text[: rng.integers(0, 9)], *some(1, 12)])
            case _:
                tokens = rng.permutation(VOCAB)[: rng.integers(0, 3)].tolist()
                parents = [int(rng.integers(0, row + 1)) for row in range(len(tokens))]
                tree = follower.score(tokens, parents)
                if rng.random() < 0.7:
                    rows = tree.path(int(rng.integers(len(tree))))
                    follower.in_step.keep(rows)
                    if rng.random() < 0.7:
                        follower.candidate([*tree.tokens[rows[1:]].tolist(), *some(1, 1)])
    follower.score()


def test_a_shared_session_keeps_nothing_from_before_its_targets_pass() -> None:
    """Where all tokens are equal, what was written then would seem to be what is needed now."""
    follower = Follower(shared=True)
    follower.begin([1, 1, 1])
    follower.score([1, 1], [0, 1])
    follower.in_step.keep([0, 1, 2])
    follower.extend([1])
    follower.candidate([1, 1])
    follower.score()
    assert follower.session.taken() == [3, 3]


@pytest.mark.parametrize("shared", [False, True])
def test_room_is_what_fits_the_context(shared: bool) -> None:
    follower = Follower(shared, context=10)
    follower.begin(TEXT)
    assert follower.in_step.room == follower.in_step.max_rows == 6
    follower.score([7] * 5, range(5))
    follower.candidate([7, 8])
    assert follower.in_step.room == 4
    with pytest.raises(ContextFullError):
        follower.score([7] * 4, range(4))
    follower.score([7] * 3, range(3))  # and nothing was spoilt
    follower.candidate([9, 9, 9])
    assert follower.in_step.room == 1
    follower.score()
    follower.retract(0)
    assert follower.in_step.room == 6
    assert SyncedSession(follower.session, 10, 4).max_rows == 4


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["forward", "prefill", "commit", "rollback"])
def test_after_an_interrupt_it_is_in_step_again(call: str, when: str, shared: bool) -> None:
    """Ctrl-C may come right before or right after anything that the session did."""
    follower = Follower(shared)
    follower.begin(TEXT)
    follower.score([7, 8], [0, 1])
    follower.in_step.keep([0, 1, 2])
    follower.candidate([7, 9] if call != "prefill" else [6] * (MAX_CATCH_UP + 2))
    done = getattr(follower.session, call)

    def interrupted(*arguments: Any) -> None:
        if when == "after":
            done(*arguments)
        raise KeyboardInterrupt

    setattr(follower.session, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        follower.score()
        follower.in_step.keep([0])
    setattr(follower.session, call, done)
    follower.retract(0)
    follower.candidate([7, 8, 6])  # what was there before
    follower.score([5, 6], [0, 0])
    follower.retract(0)
    follower.score()
    follower.extend([7, 8, 6])
    follower.score()
    follower.begin(TEXT[:3])
    follower.score()


@pytest.mark.parametrize("wrong", [{}, {"held": np.zeros((1, 5), np.int32)}, {"held": np.ones(5)}])
def test_what_is_no_snapshot_of_a_session_changes_nothing(wrong: dict[str, Any]) -> None:
    session = CountingSession(model_of())
    text = SyncedSession(session, CONTEXT, 64)
    text.begin(TEXT)
    text.catch_up()
    state = text.snapshot()
    if wrong:
        with pytest.raises(ValueError):
            text.restore(state | wrong)
        with pytest.raises(KeyError):
            text.restore({"session/committed": state["session/committed"]})
    text.restore(wrong if not wrong else state)
    assert session.committed == TEXT[:-1] and text.snapshot()["held"].tolist() == TEXT[:-1]
