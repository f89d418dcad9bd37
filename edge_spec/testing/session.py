"""The tests that every runtime has to pass, and those of features and of shared passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from edge_spec.core.features import GivesFeatures, collects
from edge_spec.core.model import Forward, Model, Restorable, Session
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


_LENGTH = 20  # tokens of the prompt
_COMMITTED = 3  # rows of a pass; the branch has no more
_HELD = (12, 1, 5, 9)  # tokens of each conversation at first
_ROUNDS = 5
_MOST_ROWS = 5  # of one tree


def check_features(model: Model, layers: Sequence[int], tolerance: float) -> np.ndarray:
    """Holds sessions to what `edge_spec.core.features.GivesFeatures` promises.

    layers: ids to collect, num_layers among them where `Forward.hidden` is to be compared. The same
    token's features, computed in different ways, may differ by `tolerance` in an element: 1e-4
    suits the small values of float32, whose sums are made in another order. Needs a context of 40
    tokens. Returns those of a prompt of 20 tokens that `feature_prompt` gives, [20, layers,
    hidden_size]. Raises AssertionError that names the broken promise.
    """
    check = _FeatureCheck(model, layers, tolerance)
    whole = check.prefilled([_LENGTH])
    for size in (1, 7):
        sizes = [min(size, _LENGTH - start) for start in range(0, _LENGTH, size)]
        check.same(f"those of a prefill in blocks of {size}", check.prefilled(sizes), whole)
    check.tree(_LENGTH)
    if model.capabilities.trees:
        check.tree(0)
    check.moved()
    check.off()
    return whole


def feature_prompt(vocab_size: int) -> list[int]:
    found: list[int] = np.random.default_rng(5).integers(3, vocab_size, _LENGTH).tolist()
    return found


class _FeatureCheck:
    """Each method holds one promise, on sessions of its own."""

    def __init__(self, model: Model, layers: Sequence[int], tolerance: float) -> None:
        self._model = model
        self._layers = layers
        self._tolerance = tolerance
        self._prompt = feature_prompt(model.config.vocab_size)
        self._found: list[tuple[int, np.ndarray]] = []

    def prefilled(self, sizes: Sequence[int], text: Sequence[int] | None = None) -> np.ndarray:
        session = self._opened()
        text = self._prompt if text is None else text
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            session.prefill(text[end - size : end])
        session.close()
        at = 0
        for position, features in self._found:
            assert position == at, "prefill tells the position of each block"
            at += len(features)
        assert at == len(text), "prefill tells the features of all tokens"
        return np.concatenate([features for _, features in self._found])

    def tree(self, length: int) -> None:
        """Each row has what its path has when it is read as a prompt."""
        session, tree = self._opened(), self._tree()
        session.prefill(self._prompt[:length])
        self._rows(f"after {length} tokens", session.forward(tree), tree, self._prompt[:length])
        session.close()

    def moved(self) -> None:
        """Commits a branch, or the beginning of a chain, goes back, and is restored: later rows
        have what a fresh text has."""
        session, tree = self._opened(), self._tree()
        session.prefill(self._prompt[:8])
        session.forward(tree)
        path = tree.path(len(tree) - 1)[:_COMMITTED]
        session.commit(path)
        text = [*self._prompt[:8], *(int(tree.tokens[row]) for row in path)]
        self._rows("after a branch", session.forward(tree), tree, text)
        if isinstance(session, Restorable) and (state := session.state()):
            session.rollback(3)
            session.restore(state, len(text))
            self._rows("after a restore", session.forward(tree), tree, text)
        session.rollback(5)
        self._rows("after a rollback", session.forward(tree), tree, text[:5])
        session.close()

    def off(self) -> None:
        session = self._opened()
        assert isinstance(session, GivesFeatures)
        assert collects(session), "a session tells that it collects features"
        session.collect_features((), self._note)
        assert not collects(session), "a session tells that it collects none any more"
        session.prefill(self._prompt)
        assert not self._found, "prefill tells nothing once no features are collected"
        out = session.forward(TokenTree.chain(self._prompt[0]))
        assert out.features is None, "forward gives no features once none are collected"
        session.close()

    def same(self, what: str, found: np.ndarray, expected: np.ndarray) -> None:
        assert found.shape == expected.shape, f"{what} have the shape {found.shape}"
        assert found.dtype == np.float32, f"{what} are {found.dtype}"
        difference = float(np.abs(found - expected).max())
        assert difference <= self._tolerance, f"{what} differ by {difference}"

    def _rows(self, when: str, out: Forward, tree: TokenTree, text: Sequence[int]) -> None:
        assert out.features is not None, "forward gives features"
        rows, hidden = out.features.copy(), out.hidden
        if hidden is not None and self._layers[-1] == self._model.config.num_layers:
            self.same(f"final features {when}", rows[:, -1], hidden.copy())
        for row in range(len(tree)):
            path = [*text, *(int(tree.tokens[at]) for at in tree.path(row))]
            expected = self.prefilled([len(path)], path)[-1]
            self.same(f"features of row {row} {when}", rows[row], expected)

    def _tree(self) -> TokenTree:
        tokens = np.array(self._prompt[-6:], np.int32)
        if not self._model.capabilities.trees:
            return TokenTree.chain(int(tokens[0]), tokens[1:].tolist())
        parents = np.array([-1, 0, 1, 1, 0, 4], np.int32)
        return TokenTree(tokens, parents, np.ones(6, np.float32))

    def _opened(self) -> Session:
        session = self._model.open_session()
        assert isinstance(session, GivesFeatures), "a session gives features"
        self._found = []
        session.collect_features(self._layers, self._note)
        return session

    def _note(self, position: int, features: np.ndarray) -> None:
        self._found.append((position, features.copy()))


def check_sharing(model: Model, tolerance: float) -> float:
    """Holds a model to what `edge_spec.core.runtime_protocols.SharesPasses` promises: random trees
    of some of four conversations, in passes that they share and in passes of their own, whose
    branches are committed. Returns the largest difference of a logit.

    Logits may differ by `tolerance`. Needs a context of 48 tokens or more. Raises AssertionError
    that names the broken promise.
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
