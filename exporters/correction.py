"""Weights that make up for what the matrices before them have done to their inputs.

In a quantized model a matrix gets other inputs than in its source: X instead of E. Of all weights
those nearest to the source's outputs E W^T are W E^T X (X^T X)^-1 (least squares; Frantar et al.
2022, GPTQ, and Li et al. 2025, GPTAQ, correct in the same direction as they round). A part of the
way is best where X is a sample of few texts.
"""

from __future__ import annotations

import numpy as np

_DAMPING = 0.2  # of the mean square of the inputs
_PART = 0.5  # of the way: on the demo model the best of 0, a half and 1


def input_correction(inputs: np.ndarray, exact: np.ndarray) -> np.ndarray | None:
    """Returns the matrix [columns, columns] float32 that weights [rows, columns] are multiplied
    with; None where the inputs are no numbers or zero.

    inputs, exact: [tokens, columns], those that the weights get and those that they were made for.
    """
    hessian = inputs.T @ inputs
    drift = exact.T @ inputs - hessian
    scale = np.float32(np.trace(hessian) / len(hessian))
    if not (np.isfinite(scale) and scale > 0 and np.isfinite(drift).all()):
        return None
    hessian /= scale
    drift /= scale
    diagonal = np.diag_indices_from(hessian)
    hessian[diagonal] += np.float32(_DAMPING)
    found: np.ndarray = np.linalg.solve(hessian, np.float32(_PART) * drift.T).T
    found[diagonal] += 1
    return found
