"""The test that every runtime has to pass whose sessions can share passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np

from edge_spec.core.model import Model, Session
from edge_spec.core.shared_pass import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree

_HELD = (12, 1, 5, 9)  # tokens of each conversation at first
_ROUNDS = 5
_MOST_ROWS = 5  # of one tree


def check_sharing(model: Model, tolerance: float) -> float:
    """Holds a model to what `edge_spec.core.shared_pass.SharesPasses` promises: random trees of
    some of four conversations, in passes that they share and in passes of their own, whose branches
    are committed. Returns the largest difference of a logit.

    Logits may differ by `tolerance`. Needs a context of 48 tokens or more. Raises AssertionError
    that names the broken promise.
    """
    assert isinstance(model, SharesPasses), "the model has no passes that sessions share"
    assert model.prepare_sharing(len(_HELD)) >= 2, "no two sessions share a pass"
    with ExitStack() as opened:

        def sessions() -> list[Session]:
            return [opened.enter_context(closing(model.open_session())) for _ in _HELD]

        return _SharingCheck(model, tolerance, sessions(), sessions()).rounds()


class _SharingCheck:
    """shared, own: sessions of the same texts."""

    def __init__(
        self, model: Model, tolerance: float, shared: Sequence[Session], own: Sequence[Session]
    ) -> None:
        self._model = model
        self._tolerance = tolerance
        self._shared, self._own = shared, own
        self._drawn = np.random.default_rng(3)

    def rounds(self) -> float:
        assert isinstance(self._model, SharesPasses)
        worst = 0.0
        most = min(self._model.prepare_sharing(len(_HELD)), len(_HELD))
        self._read_prompts()
        for _ in range(_ROUNDS):
            taking = self._drawn.permutation(len(_HELD))[: self._drawn.integers(2, most + 1)]
            trees = [self._tree() for _ in taking]
            parts = [
                PassPart(self._shared[each], tree) for each, tree in zip(taking, trees, strict=True)
            ]
            num_rows = sum(map(len, trees)) + int(self._drawn.integers(0, 3))
            lengths = [part.session.length for part in parts]
            outs = self._model.forward_together(parts, num_rows)
            assert lengths == [part.session.length for part in parts], "a pass commits nothing"
            for each, tree, out in zip(taking, trees, outs, strict=True):
                expected = self._own[each].forward(tree)
                assert out.logits.shape == expected.logits.shape, "each row of a tree is scored"
                worst = max(worst, float(np.abs(out.logits - expected.logits).max()))
                assert worst <= self._tolerance, "a row depends on who else is in the pass"
                path = self._path(tree)
                self._own[each].commit(path)
                self._shared[each].commit(path)
        return worst

    def _read_prompts(self) -> None:
        for own, shared, held in zip(self._own, self._shared, _HELD, strict=True):
            prompt = self._tokens(held)
            own.prefill(prompt)
            shared.prefill(prompt)

    def _tokens(self, count: int) -> list[int]:
        vocab_size = self._model.config.vocab_size
        return [int(token) for token in self._drawn.integers(0, vocab_size, count)]

    def _tree(self) -> TokenTree:
        rows = int(self._drawn.integers(1, _MOST_ROWS + 1))
        branches = self._model.capabilities.trees
        parents = [-1] + [int(self._drawn.integers(0, row)) for row in range(1, rows)]
        if not branches:
            parents = list(range(-1, rows - 1))
        return TokenTree(
            np.array(self._tokens(rows), np.int32),
            np.array(parents, np.int32),
            np.ones(rows, np.float32),
        )

    def _path(self, tree: TokenTree) -> list[int]:
        return [int(row) for row in tree.path(int(self._drawn.integers(0, len(tree))))]
