"""The tests that every runtime has to pass whose sessions give features, or share passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np

from edge_spec.core.features import GivesFeatures, collects
from edge_spec.core.model import Forward, Model, Restorable, Session
from edge_spec.core.shared_pass import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree

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
    """Returns the tokens whose features `check_features` gives."""
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
        """Features of a text that is read in blocks."""
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
    """Holds a model to what `edge_spec.core.shared_pass.SharesPasses` promises: random trees of
    some of four conversations, in passes that they share and in passes of their own, whose branches
    are committed. Returns the largest difference of a logit.

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
