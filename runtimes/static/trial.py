"""Compares what a device computes of a model with what the CPU does.

Some providers take a graph and compute it wrong: OpenVINO's 1.8.1 gives scores for the demo model
that have nothing to do with it, without an error. Others compute chains right and trees wrong:
WebGPU's attention counts positions by itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Model, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError, SessionError

_PROMPT_TOKENS = 96  # values that float16 cannot hold come with some tokens alone
_CHAIN = (-1, 0, 1, 2)
_TREE = (-1, 0, 0, 2)  # so that masks and positions are tried, too
# Of the scores' deviation. float16 of the demo model is off by less than a tenth of it; a wrong
# mask, position or matrix by about 1.
_TOLERANCE = 0.25


class TrialScores(NamedTuple):
    """[rows, vocab] float32 each, of a few rows after a short prompt."""

    chain: np.ndarray
    tree: np.ndarray | None  # None where only chains are taken


def scores(model: Model) -> TrialScores:
    """Raises SessionError, ContextFullError where the context is shorter."""
    rows = len(_TREE)
    random = np.random.RandomState(0)
    tokens = random.randint(0, model.config.vocab_size, _PROMPT_TOKENS + rows).astype(np.int32)
    prompt = min(_PROMPT_TOKENS, max(0, model.config.context_length - rows))
    session = model.open_session()
    try:
        session.prefill(tokens[:prompt].tolist())
        chain = _scored(session, tokens[-rows:], _CHAIN)
        tree = None
        if model.capabilities.trees:
            with suppress(SessionError):  # of a device that refuses them
                tree = _scored(session, tokens[-rows:], _TREE)
        return TrialScores(chain, tree)
    finally:
        session.close()


def require_same(found: TrialScores, expected: TrialScores, devices: str) -> bool:
    """Returns whether trees are scored as on the CPU, too; where they are not, chains may run.

    Raises DeviceError where the scores of a chain are not those of the CPU.
    """
    wrong = _fault(found.chain, expected.chain)
    if wrong is not None:
        raise DeviceError(
            f"{devices} computes this model wrong: {wrong}",
            remedy="Choose another --device or --runtime, or update its driver.",
        )
    if found.tree is None or expected.tree is None:
        return found.tree is expected.tree
    return _fault(found.tree, expected.tree) is None


def _scored(session: Session, tokens: np.ndarray, parents: tuple[int, ...]) -> np.ndarray:
    tree = TokenTree(tokens, np.array(parents, np.int32), np.ones(len(tokens), np.float32))
    return session.forward(tree).logits.astype(np.float32)  # a copy: the next pass overwrites them


def _fault(found: np.ndarray, expected: np.ndarray) -> str | None:
    """Returns what is wrong with scores; None where they are the CPU's, but for rounding."""
    if not np.isfinite(found).all():
        return "it makes scores that are no finite numbers, as where float16 overflows"
    difference = found.astype(np.float64) - expected
    error = float(np.std(difference, axis=1).max() / np.std(expected, axis=1).min())
    if not error <= _TOLERANCE:
        return f"its scores are off by {error:.2f} of their deviation"
    return None
