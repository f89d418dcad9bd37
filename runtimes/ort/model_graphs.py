"""The graphs of one model, each loaded when it is first wanted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from threading import Lock, Thread
from typing import Any

import numpy as np

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.threads import ThreadGovernor
from edge_spec.errors import BundleError, EdgeSpecError, UnsupportedModelError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort.caches import Place, place_of
from edge_spec.runtimes.ort.graph_forms import GraphForm, feature_graph, formed_graph
from edge_spec.runtimes.ort.graph_loader import GRAPH_FILE, GraphLoader
from edge_spec.runtimes.ort.joint_graph import joint_graph
from edge_spec.runtimes.ort.signature import translated

PARTIAL_FILE = "partial.onnx"  # the same weights; every sublayer is optional
ENCODER_FILE = "encoder.onnx"  # beside the graph of its decoder
_log = logging.getLogger(__name__)


class ModelGraphs(GraphLoader):
    """Sessions may load graphs from threads of their own.

    form: of the whole model's graph; None: as it is stored, which suits the CPU. place: where
    sessions keep keys and values; None: where the options say.
    """

    def __init__(
        self, bundle: Bundle, options: RuntimeOptions, form: GraphForm | None, place: Place | None
    ) -> None:
        super().__init__(bundle, options, has_own_products=form is None)
        self.form = form
        self.place = place or place_of(self.devices)
        self._features: frozenset[int] = frozenset()  # that the whole model's graph gives
        self.whole: Any = self._open_whole()
        _require_described(self.whole, bundle)
        self.encoder: Any = None
        if self.config.encoder is not None:
            self.encoder = self.open(ENCODER_FILE, stops_spinning=True)
        self._partial: Any = None
        self._slim: Any = None  # the whole model with fewer threads, once that is ready
        self._opening: Thread | None = None  # what opens it, or has opened it
        self._lock, self._threads_lock = Lock(), Lock()

    def governor(self) -> ThreadGovernor | None:
        """Return a governor for one session; None where there are no fewer threads."""
        if self.threads is None or self.threads < 2:
            return None
        return ThreadGovernor(self.threads, steps=1, is_ready=self.is_ready)

    def with_threads(self, threads: int) -> Any:
        """Return the whole model with this number of threads, of those that the governor knows;
        None until it is ready."""
        return self.whole if threads == self.threads else self._slim

    def is_ready(self, threads: int) -> bool:
        """Begins to load the graph again with fewer threads, which onnxruntime cannot change, in a
        thread of its own, where there is memory for a second copy of the packed weights."""
        with self._threads_lock:
            if self._opening is None and threads != self.threads and self.has_room():
                self._opening = Thread(target=self._open_slim, args=(threads,), daemon=True)
                self._opening.start()
            return self.with_threads(threads) is not None

    def _open_slim(self, threads: int) -> None:
        try:
            self._slim = self._open_whole(threads)
        except EdgeSpecError as error:  # the text goes on as before
            _log.info("not opened with fewer threads: %s", error)

    def _forget_slim(self) -> None:
        thread = self._opening
        if thread is not None:
            thread.join()
        with self._threads_lock:
            self._opening = self._slim = None

    def _open_whole(self, threads: int | None = None) -> Any:
        """Raises BundleError, DeviceError."""
        if self.form is None and not self._features:
            return self.open(GRAPH_FILE, threads)
        graph = self.bundle.file(GRAPH_FILE)
        if self.form is not None:
            return self.open(GRAPH_FILE, threads, *formed_graph(graph, self.config, self.form))
        made = feature_graph(graph, self.config, self._features)
        return self.open(GRAPH_FILE, threads, made)

    def open_featured(self, layers: Sequence[int]) -> Any:
        """Return the graph that gives these features, too. It takes the place of the one without,
        so that no second copy of the weights stays once other sessions are closed. Raises
        BundleError, and UnsupportedModelError where devices have a graph of another form."""
        if self.form is not None:
            raise UnsupportedModelError(
                "what the model's layers compute is given on the CPU alone",
                remedy="Use --device cpu, or another drafter.",
            )
        with self._lock:
            before, wanted = self._features, self._features.union(layers)
            if wanted != before:
                self._features = wanted
                try:
                    self.whole = self._open_whole()
                except BaseException:
                    self._features = before
                    raise
                self._forget_slim()
            return self.whole

    def open_partial(self) -> Any:
        """Return the graph in which every sublayer is optional. Raises UsageError where the bundle
        has none, or the cache is another."""
        if self.form is not None:
            raise UsageError(
                "a model cannot draft for itself on this device, whose cache is of another kind",
                remedy="Choose another --drafter, or --device cpu.",
            )
        if PARTIAL_FILE not in self.bundle.manifest.files:
            raise UsageError(
                f"{self.bundle.path} was exported without {PARTIAL_FILE}: the model cannot draft "
                "for itself",
                remedy="Export it again.",
            )
        with self._lock:
            if self._partial is None:
                opened = self.open(PARTIAL_FILE)
                _require_described(opened, self.bundle)
                self._partial = opened
            return self._partial

    def open_joint(self, num_places: int) -> Any:
        """Load the graph for passes that as many sessions share."""
        made = joint_graph(self.bundle.file(GRAPH_FILE), num_places)
        return self.open(GRAPH_FILE, made=made, stops_spinning=True)

    def encode(self, source: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Return the keys and values of a source, by the names of the decoder's inputs. Raises
        SessionError, DeviceMemoryError."""
        names = [value.name for value in self.encoder.get_outputs()]
        with translated(len(source), 0):
            found = self.encoder.run(names, {"input_ids": np.array([source], np.int64)})
        return dict(zip(names, found, strict=True))

    def close(self) -> None:
        self._forget_slim()
        self.whole = self._partial = self.encoder = None


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
