"""Models in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from edge_spec.core.features import require_none_alone
from edge_spec.core.model import Capabilities, Forward, RuntimeOptions, Session
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.ort.caches import DeviceCache, Place
from edge_spec.runtimes.ort.graph_forms import GraphForm
from edge_spec.runtimes.ort.joint import JointPasses, places_for
from edge_spec.runtimes.ort.model_graphs import ModelGraphs
from edge_spec.runtimes.ort.session import HostSession, OrtSession, OrtSourceSession
from edge_spec.runtimes.ort.signature import Graph


class OrtModel:
    """Weights and threads that sessions share. form, place: see `ModelGraphs`."""

    def __init__(
        self,
        bundle: Bundle,
        options: RuntimeOptions,
        form: GraphForm | None = None,
        place: Place | None = None,
    ) -> None:
        self.graphs = ModelGraphs(bundle, options, form, place)
        self.config = self.graphs.config
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=form is None,
            rollback=True,
            hidden_states=True,
            rounds_activations=form is None and bundle.manifest.quantization.startswith("int"),
            kernels=self.graphs.kernels,
        )
        self._joint: JointPasses | None = None
        self._lock = Lock()  # any thread may prepare sharing

    def open_session(self) -> Session:
        graphs, config = self.graphs, self.config
        if graphs.place is not None:
            graph = Graph.of(graphs.whole)
            return OrtSession(graph, config, DeviceCache(config, graph.cache, graphs.place))
        session = HostSession(config, graphs)
        return session if config.encoder is None else OrtSourceSession(session, config)

    def prepare_sharing(self, num_sessions: int) -> int:
        """Load the graph for shared passes, with the most places ever wanted, if memory allows
        another copy of the packed weights."""
        graphs = self.graphs
        if graphs.threads is None or graphs.form is not None or graphs.place is not None:
            return 1  # other devices were not measured
        if self.config.encoder is not None:
            return 1  # each session attends to its own source
        with self._lock:
            held = 1 if self._joint is None else self._joint.num_places
            wanted = places_for(num_sessions)
            if wanted <= held or not graphs.has_room():
                return held
            self._joint = JointPasses(graphs.open_joint(wanted), wanted, self.config)
            return wanted

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        assert self._joint is not None
        sessions = [part.session for part in parts if isinstance(part.session, HostSession)]
        require_none_alone(sessions)
        return self._joint.score(sessions, [part.tree for part in parts], num_rows)

    def close(self) -> None:
        self._joint = None
        self.graphs.close()
