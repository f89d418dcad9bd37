"""Tests that every runtime must pass, and those of shared passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from edge_spec.core.model import Model, Restorable, Session
from edge_spec.core.runtime_protocols import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError
from edge_spec.scheduler.batch_invariance import (
    USUAL_WIDTHS,
    BatchInvariance,
    measure_batch_invariance,
)


@dataclass(frozen=True)
class SessionReport:
    max_difference: float  # in a logit, between two ways to score the same row
    batch_invariance: BatchInvariance


def check_session(model: Model, tolerance: float) -> SessionReport:
    """Check that a runtime's sessions keep the promises of `edge_spec.core.model.Session`.

    Two ways to score a row may differ by `tolerance` in a logit: 1e-3 suits float32, whose sums
    differ by up to 1e-4 between processors and widths. Needs a context of at least 32 tokens; a
    short one keeps the check fast. Raises AssertionError that names the broken promise.
    """
    check = SessionCheck(model, tolerance)
    check.passes()
    check.most_rows_dropped()
    check.two_sessions()
    check.context_full()
    return SessionReport(check.max_difference, measure_batch_invariance(model, USUAL_WIDTHS))


def _branching(tokens: Sequence[int]) -> TokenTree:
    """Build a tree of 7 tokens: three paths of different lengths, branching at rows 0 and 1."""
    parents = np.array([-1, 0, 1, 1, 0, 4, 5], np.int32)
    return TokenTree(np.array(tokens, np.int32), parents, np.ones(7, np.float32))


def _path(tree: TokenTree, row: int) -> list[int]:
    return [int(tree.tokens[at]) for at in tree.path(row)]


class SessionCheck:
    """Compares each row of a pass with plain decoding of its path. Public methods each check one
    promise on their own sessions."""

    def __init__(self, model: Model, tolerance: float) -> None:
        self.max_difference = 0.0
        self._model = model
        self._tolerance = tolerance
        vocab_size = model.config.vocab_size
        self.prompt = np.random.default_rng(1).integers(0, vocab_size, 12).tolist()
        if model.config.encoder is not None:  # three tokens are its source, the rest its answer
            self.prompt[2:4] = [model.config.encoder.start_id] * 2
        tokens = np.random.default_rng(2).integers(0, vocab_size, 6).tolist()
        self._draft_tokens = tokens
        self._chain = TokenTree.chain(tokens[0], tokens[1:])
        self._tree = _branching([*tokens, tokens[0]]) if model.capabilities.trees else None
        self._alone: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}

    def alone(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """Return plain decoding's logits [vocab] for the last token of `path` after `text`."""
        if (tuple(text), tuple(path)) not in self._alone:
            session = self._opened(text)
            for end, token in enumerate(path, start=1):
                logits = session.forward(TokenTree.chain(token)).logits[0].copy()
                self._alone[tuple(text), tuple(path[:end])] = logits
                session.commit([0])
            session.close()
        return self._alone[tuple(text), tuple(path)]

    def score(self, session: Session, tree: TokenTree) -> np.ndarray:
        """Return the values to compare, [rows, ...]; here logits."""
        found: np.ndarray = session.forward(tree).logits.copy()
        return found

    def same(self, what: str, found: np.ndarray, expected: np.ndarray) -> None:
        assert found.shape == expected.shape, f"{what} has the shape {found.shape}"
        assert found.dtype == np.float32, f"{what} is {found.dtype}"
        difference = float(np.abs(found - expected).max())
        assert difference <= self._tolerance, f"{what} differs by {difference}"
        self.max_difference = max(self.max_difference, difference)

    def passes(self) -> None:
        self.prefill_in_chunks()
        self.commit_of_a_chain()
        if self._tree is not None:
            self.branches()
        if self._model.capabilities.rollback:
            self.rollback()
        self.restore()

    def prefill_in_chunks(self) -> None:
        for size in (len(self.prompt), 1, 5):
            session = self._opened(self.prompt, size)
            self._holds(f"after a prefill in chunks of {size}", session, self.prompt)
            session.close()

    def commit_of_a_chain(self) -> None:
        session = self._opened(self.prompt)
        session.forward(TokenTree.chain(self._draft_tokens[0], self._draft_tokens[1:]))
        session.commit(range(3))
        self._holds("after a partial commit", session, self.prompt + self._draft_tokens[:3])
        session.close()

    def branches(self) -> None:
        assert self._tree is not None
        for length in (len(self.prompt), 0):
            text = self.prompt[:length]
            session = self._opened(text)
            self._holds_rows(f"a tree after {length} tokens", session, self._tree, text)
            session.close()
        session, last = self._opened(self.prompt), len(self._tree) - 1
        session.forward(self._tree)
        session.commit(self._tree.path(last))
        self._holds("after a branch", session, self.prompt + _path(self._tree, last))
        session.close()

    def rollback(self) -> None:
        session = self._opened(self.prompt)
        for length in (len(self.prompt) - 1, 5, 1, 0):
            session.rollback(length)
            assert session.length == length, "rollback sets the length"
            session.prefill(self.prompt[length:])
            self._holds(f"after a rollback to {length}", session, self.prompt)
        session.close()

    def most_rows_dropped(self) -> None:
        """Check the widest verifying pass, twice, with all rows but the first dropped."""
        width = min(self._model.capabilities.verified_rows, self._model.config.context_length // 3)
        wrong = (self.prompt * width)[: width - 1]
        session, text = self._opened(self.prompt), list(self.prompt)
        for token in self._draft_tokens[:2]:
            session.forward(TokenTree.chain(token, wrong))
            session.commit([0])
            text.append(token)
            self._holds(f"after {width - 1} rows were dropped", session, text)
        session.close()

    def restore(self) -> None:
        session = self._opened(self.prompt[:6])
        session.forward(TokenTree.chain(self.prompt[6], self._draft_tokens))
        session.commit([0])
        session.prefill(self.prompt[7:])
        session.forward(TokenTree.chain(*self._draft_tokens[:1]))  # not committed
        state = session.state() if isinstance(session, Restorable) else {}
        if not state:
            session.close()
            return
        length, other_text = len(self.prompt), self.prompt[::-1][:5]
        other = self._opened(other_text)
        assert isinstance(other, Restorable)
        self._refused(other, state, length)
        self._holds("in a session that returned its state", session, self.prompt)
        self._holds("in a session that refused a state", other, other_text)
        other.restore(state, length)
        assert other.length == length, "restore sets the length"
        session.close()  # a state is a copy
        self._holds("in a restored session", other, self.prompt)
        if self._model.capabilities.rollback:
            other.rollback(6)
            self._holds("after a restored session's rollback", other, self.prompt[:6])
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

    def two_sessions(self) -> None:
        texts = (self.prompt, self.prompt[::-1][:5])
        sessions = [self._opened(text) for text in texts]
        for session, text in zip(sessions[::-1], texts[::-1], strict=True):
            self._holds("beside another session", session, text)
        for session in sessions:
            session.close()

    def context_full(self) -> None:
        limit = self._model.config.context_length
        tokens = (self.prompt * (limit // len(self.prompt) + 1))[:limit]
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

    def _opened(self, text: Sequence[int], chunk: int | None = None) -> Session:
        session, chunk = self._model.open_session(), chunk or max(1, len(text))
        assert session.length == 0, "a new session is empty"
        self._prepare(session)
        for start in range(0, len(text), chunk):
            session.prefill(text[start : start + chunk])
        assert session.length == len(text), "prefill commits its tokens"
        return session

    def _prepare(self, session: Session) -> None:
        """Prepare a new session; subclasses override it."""

    def _holds(self, when: str, session: Session, text: Sequence[int]) -> None:
        """Check that a session scores as after reading exactly `text`."""
        assert session.length == len(text), f"the length is that of the text {when}"
        for kind, tree in (("chain", self._chain), ("tree", self._tree)):
            if tree is not None:
                self._holds_rows(f"a {kind} {when}", session, tree, text)

    def _holds_rows(
        self, what: str, session: Session, tree: TokenTree, text: Sequence[int]
    ) -> None:
        found = self.score(session, tree)
        assert session.length == len(text), "forward commits nothing"
        for row in range(len(tree)):
            self.same(f"row {row} of {what}", found[row], self.alone(text, _path(tree, row)))


_HELD = (12, 1, 5, 9)  # initial tokens of each conversation
_ROUNDS = 5
_MOST_ROWS = 5  # in one tree


def check_sharing(model: Model, tolerance: float) -> float:
    """Check the promises of `edge_spec.core.runtime_protocols.SharesPasses`; return the largest
    difference in a logit.

    Compares shared and separate passes of random trees from four conversations, with branches
    committed. Logits may differ by `tolerance`. Needs a context of at least 48 tokens. Raises
    AssertionError that names the broken promise.
    """
    assert isinstance(model, SharesPasses), "the model has no passes that sessions share"
    most = min(model.prepare_sharing(len(_HELD)), len(_HELD))
    assert most >= 2, "no two sessions share a pass"
    worst, drawn, unread_drawn = 0.0, np.random.default_rng(3), np.random.default_rng(4)
    vocab_size = model.config.vocab_size
    with ExitStack() as opened:
        shared, own = (
            [opened.enter_context(closing(model.open_session())) for _ in _HELD] for _ in range(2)
        )
        for mine, theirs, held in zip(own, shared, _HELD, strict=True):
            prompt = drawn.integers(0, vocab_size, held).tolist()
            mine.prefill(prompt)
            theirs.prefill(prompt)
        for _ in range(_ROUNDS):
            taking = drawn.permutation(len(_HELD))[: drawn.integers(2, most + 1)]
            trees = [_random_tree(model, drawn) for _ in taking]
            unread = int(unread_drawn.integers(0, 2 * len(taking)))  # of the parts, maybe none
            parts = [
                PassPart(shared[each], tree, is_scored=at != unread)
                for at, (each, tree) in enumerate(zip(taking, trees, strict=True))
            ]
            num_rows = sum(map(len, trees)) + int(drawn.integers(0, 3))
            lengths = [part.session.length for part in parts]
            outs = model.forward_together(parts, num_rows)
            assert lengths == [part.session.length for part in parts], "a pass commits nothing"
            for each, part, out in zip(taking, parts, outs, strict=True):
                expected = own[each].forward(part.tree)
                if part.is_scored:
                    assert out.logits.shape == expected.logits.shape, "each row of a tree is scored"
                    worst = max(worst, float(np.abs(out.logits - expected.logits).max()))
                assert worst <= tolerance, "a row depends on who else is in the pass"
                path = part.tree.path(int(drawn.integers(0, len(part.tree))))
                own[each].commit(path)
                part.session.commit(path)
    return worst


def _random_tree(model: Model, drawn: np.random.Generator) -> TokenTree:
    rows = int(drawn.integers(1, _MOST_ROWS + 1))
    parents = [-1] + [int(drawn.integers(0, row)) for row in range(1, rows)]
    if not model.capabilities.trees:
        parents = list(range(-1, rows - 1))
    tokens = drawn.integers(0, model.config.vocab_size, rows)
    return TokenTree(
        tokens.astype(np.int32), np.array(parents, np.int32), np.ones(rows, np.float32)
    )
