"""Features of a session's passes (`edge_spec.core.features`).

Keys and values of some layers, kept for a network that attends to them (`core.features`).

The library's cache is its own: what a pass adds to it is copied while it is computed (taps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import OnPrefilled
from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.runtimes.llamacpp.batch import Batch
from edge_spec.runtimes.llamacpp.library import PREFILL_TOKENS, ContextChoices, Library
from edge_spec.runtimes.llamacpp.taps import Tap
from edge_spec.runtimes.llamacpp.weights import GgufWeights

_TRIED_TOKENS = 256  # of the context that tells which streams there are: the library has no less


class Features:
    """Collects for a session the residual streams that enter layers, and the final state.

    Raises UnsupportedModelError where the library gives no such streams of this model.
    """

    def __init__(
        self,
        weights: GgufWeights,
        layers: Sequence[int],
        on_prefilled: OnPrefilled,
        choices: ContextChoices,
    ) -> None:
        """choices: of the session's context."""
        self.on_prefilled = on_prefilled
        self.has_final = weights.num_layers in layers
        self.streams = tuple(layer for layer in layers if layer < weights.num_layers)
        self._weights = weights
        if self.has_final and not weights.gives_final_states:
            raise _unsupported(weights.library, "final states of this model")
        untried = [layer for layer in self.streams if layer not in weights.known_streams]
        if untried:
            _require(weights, untried, choices)
            weights.known_streams.update(untried)

    def fitted(self, choices: ContextChoices) -> ContextChoices:
        """Returns those of a context that gives the features. Prompts are read in the passes in
        which they always are: others, of fewer rows, could leave other last bits in the cache."""
        num_outputs, tap = choices.num_outputs, choices.tap
        if self.has_final:
            num_outputs = num_outputs or PREFILL_TOKENS
        if self.streams:
            tap = tap or new_tap(self._weights, PREFILL_TOKENS)
        return replace(choices, num_outputs=num_outputs, tap=tap)

    def read(
        self,
        tap: Tap | None,
        num_rows: int,
        hidden: np.ndarray | None,
        rows: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Copies the last pass's: [rows, features, hidden_size] float32. num_rows: of the pass.
        hidden: its final states. rows: those that are wanted, None for all. Raises SessionError."""
        wanted = slice(num_rows) if rows is None else rows
        num_wanted, num_streams = num_rows if rows is None else len(rows), len(self.streams)
        shape = (num_wanted, num_streams + self.has_final, self._weights.hidden_size)
        found = np.empty(shape, np.float32)
        if num_streams:
            if tap is None or tap.missing(num_rows):
                raise _missing("inputs of layers")
            tap.copy_rows(self.streams, wanted, found[:, :num_streams])
        if self.has_final:
            if hidden is None:
                raise _missing("hidden states")
            found[:, -1] = hidden[wanted]
        return found


def _require(weights: GgufWeights, streams: Sequence[int], choices: ContextChoices) -> None:
    """Tries a pass of one token in a context of its own. Raises UnsupportedModelError,
    SessionError."""
    library, tap = weights.library, new_tap(weights, 1)
    tap.want(streams)
    tried = replace(choices, num_tokens=_TRIED_TOKENS, tap=tap)
    batch = Batch(library.batch_type, 1, 1)
    opened = weights.open_context(tap, tried)
    try:
        failed = library.decode(opened.handle, batch.chain([0], 0))
        library.synchronize(opened.handle)
    finally:
        opened.free()
    missing = streams if failed else tap.missing(1)
    if missing:
        layers = ", ".join(map(str, missing))
        architecture = f"of the architecture {weights.architecture!r}"
        raise _unsupported(library, f"inputs of the layers {layers} {architecture}")


def new_tap(weights: GgufWeights, most_rows: int) -> Tap:
    new_tap = weights.library.new_tap
    if new_tap is None:
        raise _unsupported(weights.library, "inputs of layers")
    return new_tap(weights.hidden_size, most_rows)


def _unsupported(library: Library, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{library.name} does not give the {what}, which the drafter reads",
        remedy="Use --runtime ort, or another drafter.",
    )


def _missing(what: str) -> SessionError:
    return SessionError(f"the library returned no {what}", remedy="Update the library.")


ARCHITECTURES = ("gemma4",)  # whose graphs name their keys and values as taps.py looks for
_GROWTH = 256  # tokens that are made room for at once


class KeysValues:
    """Follows a session. config: of its model."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        """Raises UnsupportedModelError where the library gives none of this model."""
        if config.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"llama.cpp does not give the keys and values of the architecture "
                f"{config.architecture!r}, which the drafter reads",
                remedy="Use --runtime ort, or another drafter.",
            )
        self._heads = {layer: config.heads(layer) for layer in layers}
        self._kept = {
            layer: np.empty((2, heads.num_kv_heads, 0, heads.head_dim), np.float32)
            for layer, heads in self._heads.items()
        }
        self.length = 0  # tokens whose are kept, from the first on
        self._last: dict[int, tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def sizes(self) -> dict[int, int]:
        """Counts the numbers of a token's keys in each layer; it has as many values."""
        return {layer: heads.kv_size for layer, heads in self._heads.items()}

    def take(self, tap: Tap | None, rows: int) -> None:
        """Takes those of the last pass, none of whose rows is committed yet."""
        self._last = None if tap is None else tap.keys_values(rows)

    def commit(self, rows: Sequence[int], length: int) -> None:
        """Keeps these rows of the last pass after the first `length` tokens."""
        if self._last is None or self.length < length:
            return  # nothing is known of those before
        end, taken = length + len(rows), np.asarray(rows)
        for layer, both in self._last.items():
            self._make_room(layer, end)
            for part, found in zip(self._kept[layer], both, strict=True):
                own = found[taken].reshape(len(taken), *part.shape[::2])
                part[:, length:end] = own.swapaxes(0, 1)
        self.length = end

    def cut(self, length: int) -> None:
        """Forgets the tokens from this one on."""
        self.length = min(self.length, length)

    def of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self._kept[layer][:, :, : self.length]
        return keys, values

    def _make_room(self, layer: int, tokens: int) -> None:
        kept = self._kept[layer]
        missing = tokens - kept.shape[2]
        if missing > 0:
            room = max(missing, _GROWTH)
            self._kept[layer] = np.pad(kept, [(0, 0), (0, 0), (0, room), (0, 0)])
