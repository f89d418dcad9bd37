"""Sequences on their way through the reference transformer, a layer at a time.

A model that is opened keeps all of its weights in float32; here none is kept. All sequences pass a
layer together, so that each matrix is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.export import Observe
from edge_spec.core.model import require_room
from edge_spec.core.model_info import TensorRows
from edge_spec.runtimes.reference.arithmetic import Arithmetic, Positions
from edge_spec.runtimes.reference.operations import Heads

_SERIAL_PRODUCT = 1 << 18  # multiplications, up to which OpenBLAS computes with one thread
_HEAD_ROWS = 8192  # of the vocabulary at a time: 128 MB at a hidden size of 4096


class ReferenceLayerStream(Arithmetic):
    """See `edge_spec.core.export.LayerStream`."""

    def __init__(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> None:
        """Raises ContextFullError for a sequence that is longer than the model's context."""
        longest = max(map(len, sequences))
        require_room(0, longest, source.config.context_length)
        super().__init__(source, longest)
        self.num_done = 0
        self._source = source
        self._observe = observe
        ends = np.cumsum([len(tokens) for tokens in sequences])
        self._spans = [
            slice(end - len(each), end) for each, end in zip(sequences, ends, strict=True)
        ]
        self._positions = np.concatenate([np.arange(len(tokens)) for tokens in sequences])
        tokens = np.concatenate(sequences)
        self._x = self.scaled(self.rows("model.embed_tokens.weight", tokens))
        self._inputs = self.layer_inputs(tokens, self._x)
        self._kept: dict[int, Heads] = {}  # of layers that later ones have keys and values from

    def weight(self, name: str) -> np.ndarray:
        return self._source.float32(name)

    def rows(self, name: str, numbers: np.ndarray) -> np.ndarray:
        return self._source.float32_rows(name, numbers)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        if self._observe is not None:
            self._observe(name + ".weight", x)
        return super().linear(x, name)

    def advance(self) -> None:
        self._x = self.layer(self._x, self.num_done, self._positions, self, inputs=self._inputs)
        self.num_done += 1

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """rows: which of all sequences' rows -> [len(rows), vocab]."""
        hidden = self.norm(self._x[rows], "model.norm")
        if self._observe is not None:
            self._observe(self.head_name + ".weight", hidden)
        size = self.config.vocab_size
        scores = np.empty((len(hidden), size), np.float32)
        for start in range(0, size, _HEAD_ROWS):
            part = np.arange(start, min(start + _HEAD_ROWS, size))
            head = self._source.float32_rows(self.head_name + ".weight", part)
            scores[:, start : start + len(part)] = hidden @ head.T
        return self.final(scores)

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        """See `edge_spec.runtimes.reference.arithmetic.Context`."""
        found = np.zeros((self.config.num_preceding, *gated.shape), gated.dtype)
        for span in self._spans:
            for distance, before in enumerate(found, start=1):
                before[span][distance:] = gated[span][:-distance]
        return found

    def attend_to_source(self, layer: int, queries: np.ndarray) -> np.ndarray:
        source = self._kept[self.config.kv_source(layer)]
        return self.attend(layer, Heads(queries, source.keys, source.values))

    def attend(self, layer: int, heads: Heads) -> np.ndarray:
        """Some rows at a time, which attend to what stands before them: products so small that a
        matrix library takes one thread for each. With more it waits, for as long as other processes
        have a core, thousands of times."""
        if layer in self.config.kv_sources[layer + 1 :]:
            self._kept[layer] = heads
        mixed = np.empty_like(heads.queries)
        for span in self._spans:
            own = Heads(*(part[:, span] for part in heads))
            length = own.keys.shape[1]
            step = max(1, _SERIAL_PRODUCT // (length * heads.keys.shape[-1]))
            for start in range(0, length, step):
                end = min(start + step, length)
                part = Heads(own.queries[:, start:end], own.keys[:, :end], own.values[:, :end])
                seen = np.tri(end - start, end, start, dtype=bool)
                positions = Positions(np.arange(start, end), np.arange(end))
                found = self.mix(layer, part, seen, positions)
                mixed[:, span.start + start : span.start + end] = found
        return mixed
