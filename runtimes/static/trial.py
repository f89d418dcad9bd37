"""Compare a device's results with the CPU's: some providers silently compute a graph wrong, or only
trees, where their attention counts positions by itself."""

from __future__ import annotations

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError

_PROMPT_TOKENS = 96  # only some tokens overflow float16
_CHAIN = (-1, 0, 1, 2)
_TREE = (-1, 0, 0, 2)  # also tests masks and positions
# Share of the scores' deviation. The demo model in float16 is off by less than a tenth of this, a
# wrong mask, position or matrix by about 1.
_TOLERANCE = 0.25


def scores(model: Model) -> np.ndarray:
    """Return [rows, vocab] float32 for a few rows after a short prompt: a tree if the model takes
    any. Raises SessionError, or ContextFullError for a shorter context."""
    parents = np.array(_TREE if model.capabilities.trees else _CHAIN, np.int32)
    rows = len(parents)
    random = np.random.RandomState(0)
    tokens = random.randint(0, model.config.vocab_size, _PROMPT_TOKENS + rows).astype(np.int32)
    prompt = min(_PROMPT_TOKENS, max(0, model.config.context_length - rows))
    session = model.open_session()
    try:
        session.prefill(tokens[:prompt].tolist())
        tree = TokenTree(tokens[-rows:], parents, np.ones(rows, np.float32))
        found: np.ndarray = session.forward(tree).logits.astype(np.float32)
        return found
    finally:
        session.close()


def require_same(found: np.ndarray, expected: np.ndarray, devices: str) -> None:
    """Raise DeviceError if scores differ by more than rounding."""
    wrong = _fault(found, expected)
    if wrong is not None:
        raise DeviceError(
            f"{devices} computes this model wrong: {wrong}",
            remedy="Choose another --device or --runtime, or update its driver.",
        )


def _fault(found: np.ndarray, expected: np.ndarray) -> str | None:
    if not np.isfinite(found).all():
        return "it makes scores that are no finite numbers, as where float16 overflows"
    difference = found.astype(np.float64) - expected
    error = float(np.std(difference, axis=1).max() / np.std(expected, axis=1).min())
    if not error <= _TOLERANCE:
        return f"its scores are off by {error:.2f} of their deviation"
    return None
