"""Graphs whose keys and values grow with every pass, as `exporters/optimum` writes them.

Such a graph takes the past of each layer and returns it with the rows of the pass after it; it has
no mask, so that it scores chains alone. What it returns is the next pass's past as it is where all
rows are kept; of fewer rows, and after a rollback, the beginning is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_room, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS
from edge_spec.runtimes.ort.signature import translated

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_PAST, _PRESENT = "past_key_values.", "present."
_PREFILL_SCORES = 1 << 24  # most elements: every row is scored, used or not


class GrowingCache:
    """What passes return and are given again. caches: heads and size of each input that holds keys
    or values, [1, heads, tokens, size]."""

    def __init__(self, caches: Mapping[str, tuple[int, int]], context_length: int) -> None:
        self._caches = caches
        self._context_length = context_length
        self.clear()

    def past(self, length: int) -> dict[str, OrtValue]:
        """Returns the caches of the first tokens, and forgets the others."""
        past, held = self._held
        if held != length:
            past = {
                name: OrtValue.ortvalue_from_numpy(value.numpy()[:, :, :length].copy())
                for name, value in past.items()
            }
            self.hold(past, length)
        return past

    def hold(self, past: dict[str, OrtValue], length: int) -> None:
        self._held = past, length  # one name, never half replaced

    def state(self, length: int) -> dict[str, np.ndarray]:
        """Returns each cache by the name of its input, [1, heads, length, size] float32."""
        return {name: value.numpy().copy() for name, value in self.past(length).items()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        expected = {
            name: ((1, heads, length, size), np.float32)
            for name, (heads, size) in self._caches.items()
        }
        require_state(state, expected, length, self._context_length)
        past = {name: OrtValue.ortvalue_from_numpy(state[name].copy()) for name in self._caches}
        self.hold(past, length)

    def clear(self) -> None:
        empty = {
            name: OrtValue.ortvalue_from_numpy(np.empty((1, heads, 0, size), np.float32))
            for name, (heads, size) in self._caches.items()
        }
        self.hold(empty, 0)


class GrowingPasses:
    """See `edge_spec.runtimes.ort.passes.Passes`."""

    def __init__(
        self, inference: onnxruntime.InferenceSession, cache: GrowingCache, config: ModelConfig
    ) -> None:
        self.cache = cache
        self._inference = inference
        self._inputs = {value.name for value in inference.get_inputs()}
        self._config = config
        self._run_options = onnxruntime.RunOptions()
        self._scored = 0, 0  # rows of the last pass that can still be committed, and its start
        self._present: dict[str, OrtValue] = {}  # what it returned; none once it is old

    def prefill(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, None]]:
        require_room(start, len(tokens), self._config.context_length)
        rows = max(1, min(PREFILL_ROWS, _PREFILL_SCORES // self._config.vocab_size))
        for done in range(0, len(tokens), rows):
            chunk = np.array(tokens[done : done + rows], np.int64)
            self._run(chunk, start + done)
            self.keep(range(len(chunk)), start + done)
            yield start + done + len(chunk), None

    def score(self, tree: TokenTree, start: int) -> Forward:
        """Raises ContextFullError, ValueError for branches or more than MAX_ROWS."""
        rows = len(tree)
        if rows > MAX_ROWS or not tree.is_chain:
            raise ValueError(f"{rows} rows in one pass; a chain of at most {MAX_ROWS} is expected")
        require_room(start, rows, self._config.context_length)
        return Forward(self._run(tree.tokens.astype(np.int64), start).numpy()[0])

    def keep(self, rows: Sequence[int], start: int) -> None:
        """Raises ValueError unless these are the first rows of a pass that nothing followed."""
        scored, after = self._scored
        kept = len(rows)
        if start != after or not 0 < kept <= scored or list(rows) != list(range(kept)):
            raise ValueError(f"rows {list(rows)} are not the first of {scored} in a chain")
        self.cache.hold(self._present, start + scored)  # the others go with the next pass
        self.forget()

    def forget(self) -> None:
        """Lets nobody commit rows of the last pass."""
        self._scored, self._present = (0, 0), {}

    def interrupt(self) -> None:
        """A pass ends before its next operation: what an operation does cannot be interrupted."""
        self._run_options.terminate = True

    def close(self) -> None:
        self.forget()

    def _run(self, tokens: np.ndarray, start: int) -> OrtValue:
        """One pass over rows [rows] int64; returns their logits, [1, rows, vocab] float32."""
        rows, total = len(tokens), start + len(tokens)
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(start, total, dtype=np.int64)[None],
        }
        self.forget()
        past = self.cache.past(start)
        given = {
            name: OrtValue.ortvalue_from_numpy(inputs[name])
            for name in inputs.keys() & self._inputs
        }
        wanted = ["logits", *(name.replace(_PAST, _PRESENT) for name in past)]
        with translated(rows, start):
            logits, *present = self._inference.run_with_ort_values(
                wanted, given | past, self._run_options
            )
        self._present = dict(zip(past, present, strict=True))
        self._scored = rows, start
        return logits


def read_caches(inference: Any, vocab_size: int, path: Path) -> dict[str, tuple[int, int]]:
    """Returns heads and size of each input that holds keys or values.

    Raises BundleError for anything but float32 caches [batch, heads, tokens, size], inputs that are
    known, and an output for each cache beside the scores of this vocabulary.
    """
    inputs = {value.name: value for value in inference.get_inputs()}
    outputs = {value.name: value for value in inference.get_outputs()}
    caches = {}
    for name, value in inputs.items():
        if name in _INPUTS:
            continue
        shape: Sequence[int | str] = value.shape
        fixed = [isinstance(size, int) for size in shape[1:]]
        if not name.startswith(_PAST) or name.replace(_PAST, _PRESENT) not in outputs:
            raise _unusable(path, f"an input {name}")
        if value.type != "tensor(float)" or fixed != [True, False, True]:
            raise _unusable(path, f"{name} of {value.type} and the shape {shape}")
        caches[name] = (int(shape[1]), int(shape[3]))
    if "input_ids" not in inputs or not caches or len(outputs) != len(caches) + 1:
        raise _unusable(path, "no input_ids, past_key_values and logits alone")
    if "logits" not in outputs or outputs["logits"].shape[-1] != vocab_size:
        raise _unusable(path, f"no scores of the {vocab_size} tokens that its manifest says")
    return caches


def _unusable(path: Path, what: str) -> BundleError:
    return BundleError(
        f"{path} is no graph with growing keys and values: it has {what}",
        remedy="Export the model again.",
    )
