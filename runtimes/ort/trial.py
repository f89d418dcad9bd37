"""Whether a device computes a model as the CPU does.

Some providers take a graph and compute it wrong: OpenVINO's 1.8.1 gives scores for the demo model
that have nothing to do with it, without an error.
"""

from __future__ import annotations

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError

_PROMPT_TOKENS = 6
_PARENTS = (-1, 0, 0, 2)  # so that masks and positions are tried, too
_TOLERANCE = 0.25  # of the scores' deviation; other kernels and float16 differ by a few hundredths


def scores(model: Model) -> np.ndarray:
    """[rows, vocab] float32, of a small tree after a short prompt, or of a chain where the model
    takes no other. Raises SessionError, ContextFullError where the context is shorter."""
    rows = len(_PARENTS)
    random = np.random.RandomState(0)
    tokens = random.randint(0, model.config.vocab_size, _PROMPT_TOKENS + rows).astype(np.int32)
    prompt = min(_PROMPT_TOKENS, max(0, model.config.context_length - rows))
    session = model.open_session()
    try:
        session.prefill(tokens[:prompt].tolist())
        parents = _PARENTS if model.capabilities.trees else range(-1, rows - 1)
        tree = TokenTree(tokens[-rows:], np.array(parents, np.int32), np.ones(rows, np.float32))
        return session.forward(tree).logits.copy()
    finally:
        session.close()


def require_same(found: np.ndarray, expected: np.ndarray, devices: str) -> None:
    """Raises DeviceError where the scores are not those of the CPU."""
    error = float(np.std(found - expected, axis=1).max() / np.std(expected, axis=1).min())
    if not error <= _TOLERANCE:
        raise DeviceError(
            f"onnxruntime computes this model wrong on {devices}: its scores are off by "
            f"{error:.2f} of their deviation",
            remedy="Choose another --device or --runtime, or update the provider.",
        )
