"""A model's graphs, each loaded when first needed."""

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

PARTIAL_FILE = "partial.onnx"  # same weights; every sublayer is optional
ENCODER_FILE = "encoder.onnx"  # besides the decoder's
_log = logging.getLogger(__name__)


class ModelGraphs(GraphLoader):
    """A model's graphs, which threads may load concurrently.

    form: None: as stored, for the CPU. place: memory of caches; None: the device's.
    """

    def __init__(
        self, bundle: Bundle, options: RuntimeOptions, form: GraphForm | None, place: Place | None
    ) -> None:
        super().__init__(bundle, options, has_own_products=form is None)
        self.form = form
        self.place = place or place_of(self.device)
        self._features: frozenset[int] = frozenset()  # outputs of the whole graph
        self.whole: Any = self._open_whole()
        _require_described(self.whole, bundle)
        self.encoder: Any = None
        if self.config.encoder is not None:
            self.encoder = self.open(ENCODER_FILE, stops_spinning=True)
        self._partial: Any = None
        self._slim: Any = None  # the whole graph with fewer threads, once ready
        self._opening: Thread | None = None  # its loader
        self._lock, self._threads_lock = Lock(), Lock()

    def governor(self) -> ThreadGovernor | None:
        """Return a session's thread governor; None on devices or with one thread."""
        if self.threads is None or self.threads < 2:
            return None
        return ThreadGovernor(self.threads, steps=1, is_ready=self.is_ready)

    def with_threads(self, threads: int) -> Any:
        """Return the whole graph with this many threads, None until ready."""
        return self.whole if threads == self.threads else self._slim

    def is_ready(self, threads: int) -> bool:
        """Return whether `with_threads` has a graph. If not, load it in the background, if memory
        allows a second copy of the packed weights: onnxruntime cannot change a loaded graph's
        threads."""
        with self._threads_lock:
            if self._opening is None and threads != self.threads and self.has_room():
                self._opening = Thread(target=self._open_slim, args=(threads,), daemon=True)
                self._opening.start()
            return self.with_threads(threads) is not None

    def _open_slim(self, threads: int) -> None:
        try:
            self._slim = self._open_whole(threads)
        except EdgeSpecError as error:  # decoding goes on as before
            _log.info("not opened with fewer threads: %s", error)

    def _forget_slim(self) -> None:
        thread = self._opening
        if thread is not None:
            thread.join()
        with self._threads_lock:
            self._opening = self._slim = None

    def _open_whole(self, threads: int | None = None) -> Any:
        if self.form is None and not self._features:
            return self.open(GRAPH_FILE, threads)
        graph = self.bundle.file(GRAPH_FILE)
        if self.form is not None:
            made = formed_graph(graph, self.config, self.form)
        else:
            made = feature_graph(graph, self.config, self._features)
        return self.open(GRAPH_FILE, threads, made)

    def open_featured(self, layers: Sequence[int]) -> Any:
        """Return the graph with these features. It replaces the one without, so that two copies of
        the weights exist only while older sessions do. Raises BundleError, UnsupportedModelError on
        devices."""
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
        """Return the graph with optional sublayers. Raises UsageError without one, or on
        devices."""
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
        """Load the graph for passes that so many sessions share."""
        made = joint_graph(self.bundle.file(GRAPH_FILE), num_places)
        return self.open(GRAPH_FILE, made=made, stops_spinning=True)

    def encode(self, source: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Return a source's keys and values by decoder input. Raises SessionError,
        DeviceMemoryError."""
        names = [value.name for value in self.encoder.get_outputs()]
        with translated(len(source), 0):
            found = self.encoder.run(names, {"input_ids": np.array([source], np.int64)})
        return dict(zip(names, found, strict=True))

    def close(self) -> None:
        self._forget_slim()
        self.whole = self._partial = self.encoder = None


def _require_described(inference: Any, bundle: Bundle) -> None:
    """Raises BundleError unless the graph is the manifest's, which memory is forecast from."""
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
