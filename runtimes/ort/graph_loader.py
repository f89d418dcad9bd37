"""Loads a bundle's graphs in onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import BundleError, EdgeSpecError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, free_bytes
from edge_spec.runtimes.ort import devices
from edge_spec.runtimes.ort.devices import RECORDS_PLACEMENT, require_on_device
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.listing import fault
from edge_spec.runtimes.ort.rows import OwnProducts
from edge_spec.scheduler.machine import available_cores

GRAPH_FILE = "model.onnx"
_ROOM = 4  # times the bundle's size, to load a graph again
_STOPS_SPINNING = "session.force_spinning_stop"  # idle threads stop after each pass
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # for a graph in memory


class GraphLoader:
    """Loads a bundle's graphs on a device, with its threads."""

    def __init__(
        self,
        bundle: Bundle,
        options: RuntimeOptions,
        has_own_products: bool = True,
        entries: Mapping[str, str] = MappingProxyType({}),
        **settings: bool,
    ) -> None:
        """has_own_products: our kernels may compute on the CPU. entries: session configuration;
        settings: SessionOptions attributes."""
        self._library = import_onnxruntime()
        self.device = devices.choose(self._library, options.providers)
        self._on_cpu = self.device.kind == CPU
        self._settings = {"log_severity_level": 3, **settings}
        self._entries = {RECORDS_PLACEMENT: "1", **entries}
        if options.takes_turns:  # waking threads slows a model that runs alone
            self._entries[_STOPS_SPINNING] = "1"
        self._num_threads = options.threads or 0
        if options.threads is None and available_cores() < (os.cpu_count() or 1):
            self._num_threads = available_cores()  # onnxruntime does not know about affinity
        self.bundle = bundle
        # Our graph needs rotary entries for the context and for a single row's unused second one
        # (session.MIN_ATTENDED).
        is_growing = bundle.manifest.kv_cache == "growing"
        longest = bundle.config.context_length - (0 if is_growing else 1)
        length = min(options.context_length or longest, longest)
        self.config = replace(bundle.config, context_length=length)
        self._products = OwnProducts(self._on_cpu and has_own_products)

    @property
    def kernels(self) -> str | None:
        """Our kernels in one line; None on devices."""
        return self._products.description

    @property
    def threads(self) -> int | None:
        """The threads of a CPU pass; None on devices."""
        if not self._on_cpu:
            return None
        return self._num_threads or available_cores()

    def has_room(self) -> bool:
        """Return whether memory suffices for another graph with packed weights."""
        files = (self.bundle.file(name) for name in self.bundle.manifest.files)
        free = free_bytes()
        return free is None or free > _ROOM * sum(file.stat().st_size for file in files)

    def open(
        self,
        name: str,
        threads: int | None = None,
        made: bytes | None = None,
        stops_spinning: bool = False,
    ) -> Any:
        """Return an InferenceSession. made: a graph made from the file, on its weights.
        stops_spinning: whether another graph runs meanwhile or between passes,
        which spinning threads slow. Raises BundleError, DeviceError."""
        graph, chosen = self.bundle.file(name), threads or self._num_threads
        options = partial(self._session_options, chosen, stops_spinning)
        start = partial(devices.start_session, device=self.device, ask=fault)
        try:
            session = self._products.load(
                made or graph, graph.parent, chosen or available_cores(), options, start
            )
        except EdgeSpecError:
            raise
        except Exception as error:  # onnxruntime's share no base class
            raise BundleError(
                f"onnxruntime cannot load {graph}: {error}",
                remedy="Export the model again, or update onnxruntime.",
            ) from error
        if not self._on_cpu:
            require_on_device(session, self.device)
        return session

    def _session_options(self, threads: int, stops_spinning: bool, folder: Path | None) -> Any:
        """folder: of weights, for a graph in memory."""
        options = self._library.SessionOptions()
        for name, value in self._settings.items():
            setattr(options, name, value)
        options.intra_op_num_threads = threads
        entries = dict(self._entries)
        if stops_spinning:
            entries[_STOPS_SPINNING] = "1"
        if folder is not None:
            entries[WEIGHTS_FOLDER] = str(folder)
        for name, entry in entries.items():
            options.add_session_config_entry(name, entry)
        return options
