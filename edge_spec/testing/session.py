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
    """Hold a runtime's sessions to what `edge_spec.core.model.Session` promises.

    The same row, scored in different ways, may differ by `tolerance` in a logit: 1e-3 suits
    float32, whose sums differ by up to 1e-4 from one processor and width to another. Needs a
    context of 32 tokens or more; a short one keeps the check fast. trees: False leaves branches
    out. Raises AssertionError that names the broken promise.
    """
    check = _SessionCheck(model, tolerance, trees=trees)
    check.prefill_in_chunks()
    check.commit_of_a_chain()
    if check.tree is not None:
        check.branches()
    if model.capabilities.rollback:
        check.rollback()
    check.most_rows_dropped()
    check.restore()
    check.two_sessions()
    check.context_full()
    return SessionReport(check.max_difference, measure_batch_invariance(model, USUAL_WIDTHS))


def check_trees(model: Model, tolerance: float) -> float:
    """Run only the part of `check_session` that is about branches. Returns the largest difference
    of a logit between a row of a tree and the same row after plain steps. Raises AssertionError."""
    check = _SessionCheck(model, tolerance, chains=False)
    check.branches()
    return check.max_difference


def check_features(model: Model, layers: Sequence[int], tolerance: float) -> np.ndarray:
    """Hold sessions to what `edge_spec.core.features.GivesFeatures` promises.

    layers: ids to collect, num_layers among them where `Forward.hidden` is to be compared. The same
    token's features, computed in different ways, may differ by `tolerance` in an element: 1e-4
    suits the small values of float32, whose sums are made in another order. Needs a context of 40
    tokens. Returns those of a prompt of 20 tokens that `feature_prompt` gives, [20, layers,
    hidden_size]. Raises AssertionError that names the broken promise.
    """
    check = _FeatureCheck(model, layers, tolerance)
    whole = check.prefilled(check.prompt)
    for size in (1, 7):
        chunks = check.prefilled(check.prompt, size)
        check.same(f"features of a prefill in blocks of {size}", chunks, whole)
    check.passes()
    check.off()
    return whole


def feature_prompt(vocab_size: int) -> list[int]:
    found: list[int] = np.random.default_rng(5).integers(3, vocab_size, 20).tolist()
    return found


def _branching(tokens: Sequence[int]) -> TokenTree:
    """Build a tree of 7 tokens: three paths of different lengths, which leave rows 0 and 1."""
    parents = np.array([-1, 0, 1, 1, 0, 4, 5], np.int32)
    return TokenTree(np.array(tokens, np.int32), parents, np.ones(7, np.float32))


def _path(tree: TokenTree, row: int) -> list[int]:
    return [int(tree.tokens[at]) for at in tree.path(row)]


class _RowCheck:
    """Compares each row of a pass with what the tokens of its path give by themselves."""

    def __init__(self, model: Model, tolerance: float) -> None:
        self.max_difference = 0.0
        self._model = model
        self._tolerance = tolerance

    def alone(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """Return what the last token of `path` gives after `text`, in a session of its own."""
        raise NotImplementedError

    def rows(self, what: str, found: np.ndarray, tree: TokenTree, text: Sequence[int]) -> None:
        for row in range(len(tree)):
            self.same(f"row {row} of {what}", found[row], self.alone(text, _path(tree, row)))

    def same(self, what: str, found: np.ndarray, expected: np.ndarray) -> None:
        assert found.shape == expected.shape, f"{what} has the shape {found.shape}"
        assert found.dtype == np.float32, f"{what} is {found.dtype}"
        difference = float(np.abs(found - expected).max())
        assert difference <= self._tolerance, f"{what} differs by {difference}"
        self.max_difference = max(self.max_difference, difference)


class _SessionCheck(_RowCheck):
    """Each method holds one promise, on sessions of its own."""

    def __init__(
        self, model: Model, tolerance: float, *, chains: bool = True, trees: bool = True
    ) -> None:
        super().__init__(model, tolerance)
        vocab_size = model.config.vocab_size
        self._prompt = np.random.default_rng(1).integers(0, vocab_size, 12).tolist()
        if model.config.encoder is not None:  # three tokens are its source, the others an answer
            self._prompt[2:4] = [model.config.encoder.start_id] * 2
        self._other_text = self._prompt[::-1][:5]
        tokens = np.random.default_rng(2).integers(0, vocab_size, 6).tolist()
        self._draft_tokens = tokens
        self._chain = TokenTree.chain(tokens[0], tokens[1:]) if chains else None
        takes_trees = trees and model.capabilities.trees
        self.tree = _branching([*tokens, tokens[0]]) if takes_trees else None
        self._alone: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}

    def alone(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """Return logits [vocab] of plain steps."""
        if (tuple(text), tuple(path)) not in self._alone:
            session = self._opened(text)
            for end, token in enumerate(path, start=1):
                logits = session.forward(TokenTree.chain(token)).logits[0].copy()
                self._alone[tuple(text), tuple(path[:end])] = logits
                session.commit([0])
            session.close()
        return self._alone[tuple(text), tuple(path)]

    def prefill_in_chunks(self) -> None:
        for size in (len(self._prompt), 1, 5):
            session = self._opened(self._prompt, size)
            self._holds(f"after a prefill in chunks of {size}", session, self._prompt)
            session.close()

    def commit_of_a_chain(self) -> None:
        session = self._opened(self._prompt)
        session.forward(TokenTree.chain(self._draft_tokens[0], self._draft_tokens[1:]))
        session.commit(range(3))
        self._holds("after a partial commit", session, self._prompt + self._draft_tokens[:3])
        session.close()

    def branches(self) -> None:
        assert self.tree is not None
        for length in (len(self._prompt), 0):
            session, text = self._opened(self._prompt[:length]), self._prompt[:length]
            found = session.forward(self.tree).logits.copy()
            self.rows(f"a tree after {length} tokens", found, self.tree, text)
            session.close()
        session, last = self._opened(self._prompt), len(self.tree) - 1
        session.forward(self.tree)
        session.commit(self.tree.path(last))
        self._holds("after a branch", session, self._prompt + _path(self.tree, last))
        session.close()

    def rollback(self) -> None:
        session = self._opened(self._prompt)
        for length in (len(self._prompt) - 1, 5, 1, 0):
            session.rollback(length)
            assert session.length == length, "rollback sets the length"
            session.prefill(self._prompt[length:])
            self._holds(f"after a rollback to {length}", session, self._prompt)
        session.close()

    def most_rows_dropped(self) -> None:
        """Check the widest pass that drafts, twice: all of its rows but the first are dropped."""
        width = min(self._model.capabilities.verified_rows, self._model.config.context_length // 3)
        wrong = (self._prompt * width)[: width - 1]
        session, text = self._opened(self._prompt), list(self._prompt)
        for token in self._draft_tokens[:2]:
            session.forward(TokenTree.chain(token, wrong))
            session.commit([0])
            text.append(token)
            self._holds(f"after {width - 1} rows were dropped", session, text)
        session.close()

    def restore(self) -> None:
        session = self._opened(self._prompt[:6])
        session.forward(TokenTree.chain(self._prompt[6], self._draft_tokens))
        session.commit([0])
        session.prefill(self._prompt[7:])
        session.forward(TokenTree.chain(*self._draft_tokens[:1]))  # not committed
        state = session.state() if isinstance(session, Restorable) else {}
        if not state:
            session.close()
            return
        length, other = len(self._prompt), self._opened(self._other_text)
        assert isinstance(other, Restorable)
        self._refused(other, state, length)
        self._holds("in a session that returned its state", session, self._prompt)
        self._holds("in a session that refused a state", other, self._other_text)
        other.restore(state, length)
        assert other.length == length, "restore sets the length"
        session.close()  # a state is a copy
        self._holds("in a restored session", other, self._prompt)
        if self._model.capabilities.rollback:
            other.rollback(6)
            self._holds("after a restored session's rollback", other, self._prompt[:6])
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
        first, second = self._opened(self._prompt), self._opened(self._other_text)
        for session, text in ((second, self._other_text), (first, self._prompt)):
            self._holds("beside another session", session, text)
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

    def _opened(self, text: Sequence[int], chunk: int | None = None) -> Session:
        session, chunk = self._model.open_session(), chunk or max(1, len(text))
        assert session.length == 0, "a new session is empty"
        for start in range(0, len(text), chunk):
            session.prefill(text[start : start + chunk])
        assert session.length == len(text), "prefill commits its tokens"
        return session

    def _holds(self, when: str, session: Session, text: Sequence[int]) -> None:
        """Check that a session scores as one that has read `text` and nothing else."""
        assert session.length == len(text), f"the length is that of the text {when}"
        for kind, tree in (("chain", self._chain), ("tree", self.tree)):
            if tree is not None:
                found = session.forward(tree).logits.copy()
                assert session.length == len(text), "forward commits nothing"
                self.rows(f"a {kind} {when}", found, tree, text)


class _FeatureCheck(_RowCheck):
    """Each method holds one promise, on sessions of its own."""

    def __init__(self, model: Model, layers: Sequence[int], tolerance: float) -> None:
        super().__init__(model, tolerance)
        self.prompt = feature_prompt(model.config.vocab_size)
        self._layers = layers
        self._found: list[tuple[int, np.ndarray]] = []
        tokens = self.prompt[-7:]
        takes_trees = model.capabilities.trees
        self._tree = _branching(tokens) if takes_trees else TokenTree.chain(tokens[0], tokens[1:])

    def alone(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """Return features [layers, hidden_size] of a prompt's last token."""
        found: np.ndarray = self.prefilled([*text, *path])[-1]
        return found

    def prefilled(self, text: Sequence[int], block: int | None = None) -> np.ndarray:
        """Return features [tokens, layers, hidden_size] of a text that is read in blocks."""
        session, block = self._opened(), block or len(text)
        for start in range(0, len(text), block):
            session.prefill(text[start : start + block])
        session.close()
        at = 0
        for position, features in self._found:
            assert position == at, "prefill gives the position of each block"
            at += len(features)
        assert at == len(text), "prefill gives the features of all tokens"
        return np.concatenate([features for _, features in self._found])

    def passes(self) -> None:
        """Check rows after a prefill, a commit, a restore and a rollback."""
        for length in (len(self.prompt), *([0] if self._model.capabilities.trees else [])):
            session, text = self._opened(), self.prompt[:length]
            if text:
                session.prefill(text)
            self._holds(f"after {length} tokens", session, text)
            session.close()
        session, text = self._opened(), self.prompt[:8]
        session.prefill(text)
        session.forward(self._tree)
        session.commit(self._tree.path(len(self._tree) - 1)[:3])
        text = text + _path(self._tree, len(self._tree) - 1)[:3]
        self._holds("after a commit", session, text)
        if isinstance(session, Restorable) and (state := session.state()):
            session.rollback(3)
            session.restore(state, len(text))
            self._holds("after a restore", session, text)
        session.rollback(5)
        self._holds("after a rollback", session, text[:5])
        session.close()

    def off(self) -> None:
        session = self._opened()
        assert isinstance(session, GivesFeatures)
        assert collects(session), "a session says that it collects features"
        session.collect_features((), self._note)
        assert not collects(session), "a session says that it no longer collects any"
        session.prefill(self.prompt)
        assert not self._found, "prefill gives nothing once no features are collected"
        out = session.forward(TokenTree.chain(self.prompt[0]))
        assert out.features is None, "forward gives no features once none are collected"
        session.close()

    def _holds(self, when: str, session: Session, text: Sequence[int]) -> None:
        out: Forward = session.forward(self._tree)
        assert out.features is not None, "forward gives features"
        features, hidden = out.features.copy(), out.hidden
        if hidden is not None and self._layers[-1] == self._model.config.num_layers:
            self.same(f"final features {when}", features[:, -1], hidden.copy())
        self.rows(f"features {when}", features, self._tree, text)

    def _opened(self) -> Session:
        session = self._model.open_session()
        assert isinstance(session, GivesFeatures), "a session gives features"
        self._found = []
        session.collect_features(self._layers, self._note)
        return session

    def _note(self, position: int, features: np.ndarray) -> None:
        self._found.append((position, features.copy()))


_HELD = (12, 1, 5, 9)  # tokens of each conversation at first
_ROUNDS = 5
_MOST_ROWS = 5  # of one tree


def check_sharing(model: Model, tolerance: float) -> float:
    """Hold a model to what `edge_spec.core.runtime_protocols.SharesPasses` promises: random trees
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
