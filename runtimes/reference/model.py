"""The reference transformer: numpy in float32, what every runtime and export is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.export import Observe
from edge_spec.core.model import Capabilities, Forward, RuntimeOptions
from edge_spec.core.model_info import TensorRows, Tensors
from edge_spec.core.shared_pass import PassPart, forward_one_by_one
from edge_spec.core.source_session import SourceSession
from edge_spec.errors import UsageError
from edge_spec.fitting.devices import Device, processor
from edge_spec.runtimes.reference.arithmetic import MAX_ROWS, Arithmetic
from edge_spec.runtimes.reference.layer_stream import ReferenceLayerStream
from edge_spec.runtimes.reference.session import ReferenceSession


class ReferenceModel(Arithmetic):
    """Float32 weights, read from the checkpoint when a layer is first used and then kept."""

    capabilities = Capabilities(max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True)

    def open_session(self) -> ReferenceSession | SourceSession:
        session = ReferenceSession(self)
        if self.config.encoder is None:
            return session
        return SourceSession(session, self.config.encoder, self.config.context_length)

    def prepare_sharing(self, num_sessions: int) -> int:
        return num_sessions

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """One after the other: what others are compared with."""
        return forward_one_by_one(parts)

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

    def open_layers(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> ReferenceLayerStream:
        """See `edge_spec.core.export.StreamsLayers`."""
        return ReferenceLayerStream(source, sequences, observe)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return [processor(self.name)]
