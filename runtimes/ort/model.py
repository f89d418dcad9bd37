"""Models that onnxruntime computes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from threading import Lock, Thread
from typing import Any

import numpy as np

from edge_spec.core.features import require_none_alone
from edge_spec.core.model import Capabilities, Forward, RuntimeOptions, Session
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.threads import ThreadGovernor
from edge_spec.errors import BundleError, EdgeSpecError, UnsupportedModelError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.ort.caches import DeviceCache, Place
from edge_spec.runtimes.ort.devices import count_nodes
from edge_spec.runtimes.ort.graph_forms import GraphForm, feature_graph
from edge_spec.runtimes.ort.graph_loader import GRAPH_FILE, GraphLoader
from edge_spec.runtimes.ort.joint import JointPasses, places_for
from edge_spec.runtimes.ort.joint_graph import joint_graph
from edge_spec.runtimes.ort.session import HostSession, OrtSession, OrtSourceSession
from edge_spec.runtimes.ort.signature import Graph, translated

PARTIAL_FILE = "partial.onnx"  # the same weights; every sublayer is optional
ENCODER_FILE = "encoder.onnx"  # beside the graph of its decoder
_log = logging.getLogger(__name__)


class OrtModel:
    """One InferenceSession, and a second one once a session opens a part of the model.

    Sessions share the weights and the thread pool. form: of the graph; None: as it is stored.
    place: whose memory sessions keep keys and values in; None: where the options say.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: RuntimeOptions,
        form: GraphForm | None = None,
        place: Place | None = None,
    ) -> None:
        self._loader = GraphLoader(bundle, options, form, place)
        self.form = form
        self.config = self._loader.config
        self._inference: Any = self._loader.open_whole()
        _require_described(self._inference, bundle)
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=form is None,
            rollback=True,
            hidden_states=True,
            rounds_activations=form is None and bundle.manifest.quantization.startswith("int"),
            kernels=self._loader.kernels,
        )
        self._partial: Any = None
        self._encoder: Any = None  # the graph of one
        if self.config.encoder is not None:
            self._encoder = self._loader.open(ENCODER_FILE, stops_spinning=True)
        self._lock = Lock()  # sessions may be used by threads of their own
        self._threads_lock = Lock()
        # With as many threads, or fewer; None: being opened, or not to be had.
        self._by_threads: dict[int, Any] = {}
        if self._loader.threads is not None:
            self._by_threads[self._loader.threads] = self._inference
        self._opening: Thread | None = None
        self._features: frozenset[int] = frozenset()  # that `_inference` gives
        self._joint: JointPasses | None = None

    def open_session(self) -> Session:
        place = self._loader.place
        if place is not None:
            graph = Graph.of(self._inference)
            return OrtSession(graph, self.config, DeviceCache(self.config, graph.cache, place))
        session = HostSession(self._inference, self.config, self)
        return session if self._encoder is None else OrtSourceSession(session, self.config)

    def node_placement(self) -> dict[str, dict[str, int]]:
        """Counts operators by the provider that took them: TellsNodePlacement."""
        return count_nodes(self._inference)

    def prepare_sharing(self, num_sessions: int) -> int:
        """The graph for passes of several sessions is loaded where there is memory for one more
        copy of the packed weights: with as many places as were ever wanted."""
        loader = self._loader
        if loader.threads is None or loader.form is not None or loader.place is not None:
            return 1  # not measured on other devices than the CPU
        if self._encoder is not None:
            return 1  # each session attends to a source of its own
        with self._lock:
            held, wanted = self._num_places, places_for(num_sessions)
            if wanted > held and loader.has_room():
                self._joint = JointPasses(self._open_joint(wanted), wanted, self.config)
            return self._num_places

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        assert self._joint is not None
        sessions = [part.session for part in parts if isinstance(part.session, HostSession)]
        require_none_alone(sessions)
        return self._joint.score(sessions, [part.tree for part in parts], num_rows)

    def close(self) -> None:
        self._wait_for_threads()
        self._by_threads.clear()
        self._joint = None
        self._inference = self._partial = self._encoder = None

    @property
    def _num_places(self) -> int:
        """Returns how many sessions may share a pass."""
        return 1 if self._joint is None else self._joint.num_places

    def _open_joint(self, num_places: int) -> Any:
        graph = self._loader.bundle.file(GRAPH_FILE)
        return self._loader.open(
            GRAPH_FILE, made=joint_graph(graph, num_places), stops_spinning=True
        )

    def governor(self) -> ThreadGovernor | None:
        """See `OpensGraphs`."""
        threads = self._loader.threads
        if threads is None or threads < 2:
            return None
        return ThreadGovernor(threads, steps=1, is_ready=self._is_ready)

    def with_threads(self, threads: int) -> Any:
        """See `OpensGraphs`."""
        return self._by_threads.get(threads)

    def _is_ready(self, threads: int) -> bool:
        """Begins to load the graph again with fewer threads, which onnxruntime cannot change, in a
        thread of its own, where there is memory for a second copy of the packed weights."""
        with self._threads_lock:
            if threads not in self._by_threads:
                self._by_threads[threads] = None
                if self._loader.has_room():
                    self._opening = Thread(target=self._reopen, args=(threads,), daemon=True)
                    self._opening.start()
            return self._by_threads[threads] is not None

    def _reopen(self, threads: int) -> None:
        try:
            if self._features:
                self._by_threads[threads] = self._give_features(self._features, threads)
            else:
                self._by_threads[threads] = self._loader.open_whole(threads)
        except EdgeSpecError as error:  # the text goes on as before
            _log.info("not opened with fewer threads: %s", error)

    def _wait_for_threads(self) -> None:
        """Returns when nothing is being opened."""
        with self._threads_lock:
            thread = self._opening
        if thread is not None:
            thread.join()

    def encode(self, source: Sequence[int]) -> Mapping[str, np.ndarray]:
        """See `OpensGraphs`. Raises SessionError, DeviceMemoryError."""
        names = [value.name for value in self._encoder.get_outputs()]
        with translated(len(source), 0):
            found = self._encoder.run(names, {"input_ids": np.array([source], np.int64)})
        return dict(zip(names, found, strict=True))

    def open_featured(self, layers: Sequence[int]) -> Any:
        """Loads the graph with these outputs, too, where it has others. It takes the place of the
        one without, so that no second copy of the weights stays once other sessions are closed.
        Raises BundleError, and UnsupportedModelError where devices have a graph of another form."""
        if self._loader.form is not None:
            raise UnsupportedModelError(
                "what the model's layers compute is given on the CPU alone",
                remedy="Use --device cpu, or another drafter.",
            )
        with self._lock:
            wanted = self._features.union(layers)
            if wanted != self._features:
                self._inference = self._give_features(wanted)
                self._features = wanted
                self._wait_for_threads()
                if self._loader.threads is not None:
                    with self._threads_lock:
                        self._by_threads = {self._loader.threads: self._inference}
            return self._inference

    def _give_features(self, layers: frozenset[int], threads: int | None = None) -> Any:
        graph = feature_graph(self._loader.bundle.file(GRAPH_FILE), self.config, layers)
        return self._loader.open(GRAPH_FILE, threads, graph)

    def open_partial(self) -> Any:
        """Loads it once. Raises UsageError where the bundle has none, or the cache is another."""
        bundle = self._loader.bundle
        if self._loader.form is not None:
            raise UsageError(
                "a model cannot draft for itself on this device, whose cache is of another kind",
                remedy="Choose another --drafter, or --device cpu.",
            )
        if PARTIAL_FILE not in bundle.manifest.files:
            raise UsageError(
                f"{bundle.path} was exported without {PARTIAL_FILE}: the model cannot draft "
                "for itself",
                remedy="Export it again.",
            )
        with self._lock:
            if self._partial is None:
                opened = self._loader.open(PARTIAL_FILE)
                _require_described(opened, bundle)
                self._partial = opened
            return self._partial


def _require_described(inference: Any, bundle: Bundle) -> None:
    """Raises BundleError where the graph is not as the manifest says, by which memory is taken."""
    config = bundle.config
    parts = [(layer, part) for layer in config.caching for part in ("key", "value")]
    caches = {f"past.{layer}.{part}": tuple(config.heads(layer)[1:]) for layer, part in parts}
    caches |= {f"past.{layer}.gated": (1, config.hidden_size) for layer in config.convolving}
    found = {
        value.name: (value.shape[1], value.shape[-1])
        for value in inference.get_inputs()
        if value.name.startswith("past.")
    }
    widths = {value.name: value.shape[-1] for value in inference.get_outputs()}
    scored = (widths.get("logits"), widths.get("hidden"))
    if found != caches or scored != (config.vocab_size, config.hidden_size):
        raise BundleError(
            f"{bundle.path}: its graph is not the one that its manifest describes",
            remedy="Export the model again.",
        )
