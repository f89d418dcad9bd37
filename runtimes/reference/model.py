"""The reference transformer: numpy in float32, what every runtime and export is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Capabilities, RuntimeOptions, Tensors
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.placement.devices import Device, processor
from edge_spec.runtimes.reference.arithmetic import MAX_ROWS, Arithmetic
from edge_spec.runtimes.reference.session import ReferenceSession


class ReferenceModel(Arithmetic):
    """Float32 weights, read from the checkpoint when a layer is first used and then kept."""

    capabilities = Capabilities(max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True)

    def mean_square_inputs(self, tokens: Sequence[int]) -> Mapping[str, np.ndarray]:
        """See `edge_spec.core.export.ObservesInputs`. Raises ContextFullError."""
        session = self.open_session()
        self._squares = {}
        try:
            for start in range(0, len(tokens), MAX_ROWS):
                chunk = TokenTree.chain(tokens[start], tokens[start + 1 : start + MAX_ROWS])
                session.forward(chunk)
                session.commit(range(len(chunk)))
            return {name: sums / len(tokens) for name, sums in self._squares.items()}
        finally:
            self._squares = None
            session.close()

    def open_session(self) -> ReferenceSession:
        return ReferenceSession(self)

    def close(self) -> None:
        self._weights.clear()


class ReferenceRuntime:
    name = "reference"
    reads = "checkpoint"

    def open(self, source: Tensors, options: RuntimeOptions) -> ReferenceModel:
        # It is one thread of numpy, whatever threads are asked for.
        options.require_only(self.name, "threads", "providers", "context_length")
        others = [name for name in options.providers if name.lower() != "cpu"]
        if others:
            raise UsageError(
                f"{self.name} has no device {', '.join(others)}",
                remedy="It runs on the cpu; choose another --runtime for others.",
            )
        return ReferenceModel(source, options.context_length)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return [processor(self.name)]
