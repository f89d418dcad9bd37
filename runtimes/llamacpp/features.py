"""Features of a session's passes (`edge_spec.core.features`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.features import OnPrefilled
from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.runtimes.llamacpp.library import LayerInputs, Library
from edge_spec.runtimes.llamacpp.outputs import view
from edge_spec.runtimes.llamacpp.unlisted import ARCHITECTURES
from edge_spec.runtimes.llamacpp.weights import GgufWeights


class Features:
    """Collects for a session the residual streams that enter layers, and the final state.

    Raises UnsupportedModelError where the library gives no such streams of this model.
    """

    def __init__(
        self, weights: GgufWeights, layers: Sequence[int], on_prefilled: OnPrefilled
    ) -> None:
        self.layers = tuple(layers)
        self.on_prefilled = on_prefilled
        self.has_final = weights.num_layers in layers
        self._hidden_size = weights.hidden_size
        self._streams = tuple(layer for layer in layers if layer < weights.num_layers)
        self._library = weights.library
        self._inputs = _inputs(weights.library, weights.architecture) if self._streams else None
        if self.has_final and not weights.gives_final_states:
            raise _unsupported(weights.library, "final states of this model")

    def want(self, context: int, wanted: bool) -> None:
        """Asks the library for these features in the next passes of a context."""
        for layer in self._streams:
            assert self._inputs is not None
            self._inputs.want(context, layer, wanted)

    def read(self, context: int, rows: int, hidden: np.ndarray | None) -> np.ndarray:
        """Copies the last pass's: [rows, features, hidden_size] float32. hidden: its final states.
        Raises SessionError."""
        found = np.empty((rows, len(self.layers), self._hidden_size), np.float32)
        for at, layer in enumerate(self._streams):
            assert self._inputs is not None
            address = self._inputs.address(context, layer)
            if address is None:
                raise _missing(f"the input of layer {layer}")
            found[:, at] = view(self._library, address, rows, self._hidden_size)
        if self.has_final:
            if hidden is None:
                raise _missing("hidden states")
            found[:, -1] = hidden
        return found


def _inputs(library: Library, architecture: str) -> LayerInputs:
    found = library.layer_inputs
    if found is None or architecture not in ARCHITECTURES:
        where = f"of the architecture {architecture!r}" if found else "in this build"
        raise _unsupported(library, f"inputs of layers {where}")
    return found


def _unsupported(library: Library, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{library.name} does not give the {what}, which the drafter reads",
        remedy="Use --runtime ort, or another drafter.",
    )


def _missing(what: str) -> SessionError:
    return SessionError(f"the library returned no {what}", remedy="Update the library.")
