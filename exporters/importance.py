"""Measures what an error in a weight costs: the mean square of its inputs.

The squared error of a layer's output, summed over texts, is that of its weights with these as
factors, where inputs are uncorrelated (Lin et al. 2024, AWQ, keep the same inputs' weights exact;
Kim et al. 2024, SqueezeLLM, weigh by the gradient instead).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.models import runtimes
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts
from edge_spec.text.tokenizer import Tokenizer

_PROMPTS_PER_CATEGORY = 6
_TOKENS_PER_PROMPT = 32
_Measured = TypeVar("_Measured")

_FLOOR = 1e-3  # of the mean: an input that was zero in these texts counts a little


def input_importance(checkpoint: StoredCheckpoint, progress: Progress) -> Mapping[str, np.ndarray]:
    """Returns an array [in] for each matrix; none for an embedding that is no head."""
    return _of_inputs(checkpoint, progress, importance)


def input_ranges(
    checkpoint: StoredCheckpoint, progress: Progress
) -> Mapping[str, tuple[float, float]]:
    """Returns the least and the largest value that each matrix is multiplied with."""
    return _of_inputs(checkpoint, progress, lambda x: (float(x.min()), float(x.max())))


def _of_inputs(
    checkpoint: StoredCheckpoint, progress: Progress, measure: Callable[[np.ndarray], _Measured]
) -> dict[str, _Measured]:
    """Returns what is measured of each matrix's inputs [rows, in], by the reference on the
    beginnings of our own prompts."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json())
    tokens: list[int] = []
    for prompt in read_prompts(OWN_PROMPTS, _PROMPTS_PER_CATEGORY):
        tokens += tokenizer.encode(prompt.text + "\n")[:_TOKENS_PER_PROMPT]
    tokens = tokens[: checkpoint.config.context_length]
    found: dict[str, _Measured] = {}

    def observe(name: str, inputs: np.ndarray) -> None:
        found[name] = measure(inputs)

    stream = runtimes.load_layer_stream(checkpoint, [tokens], observe)
    num_layers = checkpoint.config.num_layers
    for layer in range(num_layers):
        stream.advance()
        progress("Measuring what weights are multiplied with", (layer + 1) / num_layers)
    stream.logits(np.arange(len(tokens)))
    return found


def importance(inputs: np.ndarray) -> np.ndarray:
    """Returns [in] float64, all alike where inputs are zero or no numbers; inputs: [rows, in]."""
    squares = np.square(inputs, dtype=np.float64).mean(axis=0)
    floored: np.ndarray = squares + _FLOOR * squares.mean()
    return floored if np.isfinite(floored).all() and floored.any() else np.ones(len(floored))
