"""The test that every runtime has to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.core.model import Model, Restorable, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError
from edge_spec.exactness.batch_invariance import (
    USUAL_WIDTHS,
    BatchInvariance,
    measure_batch_invariance,
)


@dataclass(frozen=True)
class SessionReport:
    """Holds what `check_session` measured of a model that passed."""

    max_difference: float  # of a logit, between two ways to score the same row
    batch_invariance: BatchInvariance


def check_session(model: Model, tolerance: float, trees: bool = True) -> SessionReport:
    """Holds a runtime's sessions to what `edge_spec.core.model.Session` promises.

    The same row, scored in different ways, may differ by `tolerance` in a logit: 1e-3 suits
    float32, whose sums differ by up to 1e-4 from one processor and width to another. Needs a
    context of 32 tokens or more; a short one keeps the check fast. trees: False leaves branches
    out. Raises AssertionError that names the broken promise.
    """
    check = _SessionCheck(model, tolerance, trees)
    check.prefill_in_chunks()
    check.chain()
    if check.trees:
        check.tree()
        check.commit_of_a_branch()
    if model.capabilities.rollback:
        check.rollback_and_reuse()
    check.most_rows_dropped()
    check.restored()
    check.two_sessions()
    check.context_full()
    return SessionReport(check.max_difference, measure_batch_invariance(model, USUAL_WIDTHS))


def check_trees(model: Model, tolerance: float) -> float:
    """The part of `check_session` that is about branches, alone. Returns the largest difference of
    a logit between a row of a tree and the same row after plain steps. Raises AssertionError."""
    check = _SessionCheck(model, tolerance)
    check.tree()
    check.commit_of_a_branch()
    return check.max_difference


class _SessionCheck:
    """Each method holds one promise, on sessions of its own."""

    def __init__(self, model: Model, tolerance: float, trees: bool = True) -> None:
        self.trees = trees and model.capabilities.trees
        self.max_difference = 0.0
        self._model = model
        self._tolerance = tolerance
        vocab_size = model.config.vocab_size
        self._prompt = np.random.default_rng(1).integers(0, vocab_size, 12).tolist()
        if model.config.encoder is not None:  # three tokens are its source, the others an answer
            self._prompt[2:4] = [model.config.encoder.start_id] * 2
        self._draft_tokens = np.random.default_rng(2).integers(0, vocab_size, 6).tolist()

    def prefill_in_chunks(self) -> None:
        token = self._draft_tokens[0]
        whole = self._score(self._opened(self._prompt), token)
        for size in (1, 5):
            session = self._model.open_session()
            for start in range(0, len(self._prompt), size):
                session.prefill(self._prompt[start : start + size])
            self._same(f"prefill in chunks of {size}", self._score(session, token), whole)
            session.close()

    def chain(self) -> None:
        session = self._opened(self._prompt)
        out = session.forward(
            TokenTree.chain(self._draft_tokens[0], self._draft_tokens[1:])
        ).logits.copy()
        assert session.length == len(self._prompt), "forward commits nothing"
        for row, expected in enumerate(self._stepwise(self._draft_tokens)):
            self._same(f"row {row} of a chain", out[row], expected)
        session.commit(range(3))
        assert session.length == len(self._prompt) + 3, "commit keeps the rows it is given"
        again = session.forward(TokenTree.chain(self._draft_tokens[3])).logits[0]
        self._same("a row after a partial commit", again, self._stepwise(self._draft_tokens)[3])
        session.close()

    def tree(self) -> None:
        tree = self._branching()
        prompts: tuple[list[int], ...] = (self._prompt, [])
        for prompt in prompts:
            session = self._opened(prompt)
            out = session.forward(tree).logits.copy()
            for row in range(len(tree)):
                path = [int(tree.tokens[i]) for i in tree.path(row)]
                expected = self._stepwise(path, prompt)[-1]
                self._same(f"row {row} of a tree after {len(prompt)} tokens", out[row], expected)
            session.close()

    def commit_of_a_branch(self) -> None:
        tree = self._branching()
        session = self._opened(self._prompt)
        session.forward(tree)
        rows = tree.path(len(tree) - 1)
        session.commit(rows)
        assert session.length == len(self._prompt) + len(rows), "commit keeps a branch"
        path = [int(tree.tokens[row]) for row in rows]
        expected = self._stepwise([*path, self._draft_tokens[0]])[-1]
        self._same("a row after a branch", self._score(session, self._draft_tokens[0]), expected)
        session.close()

    def rollback_and_reuse(self) -> None:
        session = self._opened(self._prompt)
        for length in (len(self._prompt) - 1, 5, 1, 0):
            session.rollback(length)
            assert session.length == length, "rollback sets the length"
            session.prefill(self._prompt[length:])
            out = self._score(session, self._draft_tokens[0])
            expected = self._stepwise(self._draft_tokens[:1])[0]
            self._same(f"a row after rollback to {length}", out, expected)
        session.close()

    def most_rows_dropped(self) -> None:
        """Checks the widest pass that drafts, twice: all of its rows but the first are dropped."""
        width = min(self._model.capabilities.verified_rows, self._model.config.context_length // 3)
        wrong = (self._prompt * width)[: width - 1]
        session = self._opened(self._prompt)
        for at, token in enumerate(self._draft_tokens[:2]):
            session.forward(TokenTree.chain(token, wrong))
            session.commit([0])
            expected = self._stepwise(self._draft_tokens[: at + 2])[-1]
            found = self._score(session, self._draft_tokens[at + 1])
            self._same(f"a row after {width - 1} were dropped", found, expected)
        session.close()

    def restored(self) -> None:
        """Checks sessions whose cache can be taken out."""
        session = self._opened(self._prompt[:6])
        out = session.forward(TokenTree.chain(self._prompt[6], self._draft_tokens)).logits.copy()
        session.commit([0])
        session.prefill(self._prompt[7:])
        session.forward(TokenTree.chain(*self._draft_tokens[:1]))  # not committed
        state = session.state() if isinstance(session, Restorable) else {}
        if not state:
            session.close()
            return
        length, other = len(self._prompt), self._opened(self._prompt[::-1][:5])
        assert isinstance(other, Restorable)
        self._refused(other, state, length)
        self._same_text(session, "a session that told its state", self._prompt)
        self._same_text(other, "a session that refused a state", self._prompt[::-1][:5])
        other.restore(state, length)
        assert other.length == length, "restore sets the length"
        session.close()  # a state is a copy
        self._same_text(other, "a restored session", self._prompt)
        if self._model.capabilities.rollback:
            other.rollback(6)
            again = other.forward(TokenTree.chain(self._prompt[6], self._draft_tokens)).logits
            self._same("a chain after a restored session's rollback", again, out)
        other.close()

    def _refused(self, session: Restorable, state: Mapping[str, np.ndarray], length: int) -> None:
        limit = self._model.config.context_length
        for what, wrong, tokens in (
            ("no array", {}, length),
            ("another length", state, length - 1),
            ("a length beyond the context", state, limit + 1),
            ("arrays cut short", {each: array[:-1] for each, array in state.items()}, length),
            ("another type", {each: array.view(np.int8) for each, array in state.items()}, length),
        ):
            try:
                session.restore(wrong, tokens)
            except ValueError:
                continue
            raise AssertionError(f"restore raises ValueError for {what}")

    def _same_text(self, session: Session, what: str, text: Sequence[int]) -> None:
        """It scores what one does that has read `text`, which it still holds then."""
        expected = self._opened(text)
        trees = [TokenTree.chain(self._draft_tokens[0], self._draft_tokens[1:])]
        trees += [self._branching()] if self.trees else []
        for tree in trees:
            logits = session.forward(tree).logits.copy()
            self._same(f"a row of {what}", logits, expected.forward(tree).logits)
        expected.close()

    def two_sessions(self) -> None:
        first, second = self._opened(self._prompt), self._opened(self._prompt[::-1])
        expected = self._stepwise(self._draft_tokens[:1])[0]
        self._score(second, self._draft_tokens[1])
        self._same(
            "a row beside another session", self._score(first, self._draft_tokens[0]), expected
        )
        first.close()
        second.close()

    def context_full(self) -> None:
        limit = self._model.config.context_length
        tokens = (self._prompt * (limit // len(self._prompt) + 1))[:limit]
        session = self._opened(tokens[:-1])
        session.forward(TokenTree.chain(tokens[-1]))
        for what, call in (
            ("forward", lambda: session.forward(TokenTree.chain(0, [0]))),
            ("prefill", lambda: session.prefill([0, 0])),
        ):
            try:
                call()
            except ContextFullError:
                assert session.length == limit - 1, f"{what} beyond the context changes nothing"
            else:
                raise AssertionError(f"{what} beyond the context raises ContextFullError")
        session.close()

    def _opened(self, prompt: Sequence[int]) -> Session:
        session = self._model.open_session()
        session.prefill(prompt)
        assert session.length == len(prompt), "prefill commits its tokens"
        return session

    def _branching(self) -> TokenTree:
        """Three paths of different lengths that leave row 0 and row 1."""
        return TokenTree(
            np.array([*self._draft_tokens, self._draft_tokens[0]], np.int32),
            np.array([-1, 0, 1, 1, 0, 4, 5], np.int32),
            np.ones(7, np.float32),
        )

    def _stepwise(self, tokens: Sequence[int], prompt: Sequence[int] | None = None) -> np.ndarray:
        """Logits [tokens, vocab] of plain steps in a session of their own."""
        session = self._opened(self._prompt if prompt is None else prompt)
        scores = []
        for token in tokens:
            scores.append(self._score(session, token))
            session.commit([0])
        session.close()
        return np.stack(scores)

    def _score(self, session: Session, token: int) -> np.ndarray:
        scores: np.ndarray = session.forward(TokenTree.chain(token)).logits[0].copy()
        return scores

    def _same(self, what: str, logits: np.ndarray, expected: np.ndarray) -> None:
        assert logits.shape == expected.shape, f"{what} has the shape {logits.shape}"
        difference = float(np.abs(logits - expected).max())
        assert difference <= self._tolerance, f"{what} differs by {difference} in a logit"
        self.max_difference = max(self.max_difference, difference)
