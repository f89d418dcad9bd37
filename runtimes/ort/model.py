"""Models that onnxruntime computes, and their sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

from edge_spec.core.features import require_none_alone
from edge_spec.core.model import Capabilities, Forward, RuntimeOptions, Session
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.errors import BundleError, UnsupportedModelError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.ort.device_memory import Place
from edge_spec.runtimes.ort.devices import count_nodes
from edge_spec.runtimes.ort.fewer_threads import FewerThreads
from edge_spec.runtimes.ort.graph_forms import GraphForm, feature_graph
from edge_spec.runtimes.ort.graph_loader import GRAPH_FILE, GraphLoader
from edge_spec.runtimes.ort.growing import GrowingCache, GrowingPasses, read_caches
from edge_spec.runtimes.ort.joint import JointPasses, places_for
from edge_spec.runtimes.ort.joint_graph import joint_graph
from edge_spec.runtimes.ort.session import (
    HostSession,
    OrtSession,
    OrtSourceSession,
    device_sessions,
    encode,
)

PARTIAL_FILE = "partial.onnx"  # the same weights; every sublayer is optional
ENCODER_FILE = "encoder.onnx"  # beside the graph of its decoder


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
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=form is None or form.takes_trees,
            rollback=True,
            hidden_states=True,
            rounds_activations=form is None and bundle.manifest.quantization.startswith("int"),
        )
        self.form = form
        self.config = self._loader.config
        self._inference: Any = self._loader.open_whole()
        _require_described(self._inference, bundle)
        self.capabilities = replace(self.capabilities, kernels=self._loader.kernels)
        self._partial: Any = None
        self._encoder: Any = None  # the graph of one
        if self.config.encoder is not None:
            self._encoder = self._loader.open(ENCODER_FILE, stops_spinning=True)
        self._lock = Lock()  # sessions may be used by threads of their own
        self._fewer = FewerThreads(
            self._loader.threads, self._inference, self._reopen, self._loader.has_room
        )
        self._features: frozenset[int] = frozenset()  # that `_inference` gives
        self._joint: JointPasses | None = None
        self._open_on_device: Callable[[], OrtSession] | None = None
        if self._loader.place is not None:
            self._open_on_device = device_sessions(self._loader, self._inference)

    def open_session(self) -> Session:
        if self._open_on_device is not None:
            return self._open_on_device()

        opened = partial(HostSession, self._inference, self.config, self._open_partial, self._fewer)
        if self._encoder is None:
            return opened(open_features=self._open_features)

        return OrtSourceSession(opened(partial(encode, self._encoder)), self.config)

    def node_placement(self) -> dict[str, dict[str, int]]:
        """Counts operators by the provider that took them: TellsNodePlacement."""
        return count_nodes(self._inference)

    def prepare_sharing(self, num_sessions: int) -> int:
        """The graph for passes of several sessions is loaded where there is memory for one more
        copy of the packed weights: with as many places as were ever wanted."""

        if self._loader.threads is None or self._loader.form is not None or self._open_on_device:
            return 1  # not measured on other devices than the CPU
        if self._encoder is not None:
            return 1  # each session attends to a source of its own
        with self._lock:
            held, wanted = self._num_places, places_for(num_sessions)
            if wanted > held and self._loader.has_room():
                self._joint = JointPasses(self._open_joint(wanted), wanted, self.config)
            return self._num_places

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        assert self._joint is not None
        sessions = [part.session for part in parts if isinstance(part.session, HostSession)]
        require_none_alone(sessions)
        joining = [
            (session.passes, session.length, part)
            for session, part in zip(sessions, parts, strict=True)
        ]
        return self._joint.score(joining, num_rows)

    def close(self) -> None:
        self._fewer.close()
        self._joint = None
        self._inference = self._partial = self._open_on_device = self._encoder = None
        self._loader.release()

    @property
    def _num_places(self) -> int:
        """Returns how many sessions may share a pass."""
        return 1 if self._joint is None else self._joint.num_places

    def _open_joint(self, num_places: int) -> Any:
        graph = self._loader.bundle.file(GRAPH_FILE)
        return self._loader.open(
            GRAPH_FILE, made=joint_graph(graph, num_places), stops_spinning=True
        )

    def _reopen(self, threads: int) -> Any:
        if self._features:
            return self._open_featured(self._features, threads)
        return self._loader.open_whole(threads)

    def _open_features(self, layers: Sequence[int]) -> Any:
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
                self._inference = self._open_featured(wanted)
                self._features = wanted
                self._fewer.follow(self._inference)
            return self._inference

    def _open_featured(self, layers: frozenset[int], threads: int | None = None) -> Any:
        graph = feature_graph(self._loader.bundle.file(GRAPH_FILE), self.config, layers)
        return self._loader.open(GRAPH_FILE, threads, graph)

    def _open_partial(self) -> Any:
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


class GrowingModel:
    """A graph of growing.py. Sessions share the weights and the thread pool. Raises BundleError for
    another kind of graph."""

    def __init__(self, bundle: Bundle, options: RuntimeOptions) -> None:
        # Planned memory is kept for every shape, and each pass has a shape of its own here.
        loader = GraphLoader(bundle, options, enable_mem_pattern=False)
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=False,
            rollback=True,
            hidden_states=False,
        )
        self.config = loader.config
        self._inference: Any = loader.open(GRAPH_FILE)
        self.capabilities = replace(self.capabilities, kernels=loader.kernels)
        path = bundle.file(GRAPH_FILE)
        self._caches = read_caches(self._inference, self.config.vocab_size, path)

    def open_session(self) -> OrtSession:
        cache = GrowingCache(self._caches, self.config.context_length)
        return OrtSession(GrowingPasses(self._inference, cache, self.config))

    def node_placement(self) -> dict[str, dict[str, int]]:
        """Counts operators by the provider that took them: TellsNodePlacement."""
        return count_nodes(self._inference)

    def close(self) -> None:
        self._inference = None
