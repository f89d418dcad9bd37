"""Loads a bundle into onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from edge_spec.bundle import MANIFEST, Bundle
from edge_spec.errors import BundleError, UsageError
from edge_spec.model import Capabilities, RuntimeOptions
from edge_spec.placement.devices import CPU, Device
from edge_spec.runtimes.ort.devices import (
    add_providers,
    choose,
    import_onnxruntime,
    require_started,
)
from edge_spec.storage import cache_directory, sha256_file

if TYPE_CHECKING:
    from edge_spec.placement.memory import Memory
    from edge_spec.runtimes.ort.session import OrtSession

GRAPH_FILE = "model.onnx"
PARTIAL_FILE = "partial.onnx"  # the same weights; every sublayer is optional


class OrtModel:
    """One InferenceSession, and a second one once a session opens a part of the model.

    Sessions share the weights and the thread pool.
    """

    def __init__(self, bundle: Bundle, options: RuntimeOptions) -> None:
        options.require_only(OrtRuntime.name, "threads", "providers", "context_length")
        onnxruntime = import_onnxruntime()
        from edge_spec.runtimes.ort.passes import MAX_ROWS

        self.capabilities = Capabilities(
            max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True
        )
        self.config = bundle.config
        if options.context_length is not None:
            shorter = min(options.context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        self._devices = choose(onnxruntime, options.providers)
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        if options.takes_turns:  # waking them for each pass slows a model that runs alone
            settings.add_session_config_entry("session.force_spinning_stop", "1")
        if options.threads is not None:
            settings.intra_op_num_threads = options.threads
        self._bundle = bundle
        self._load = partial(
            onnxruntime.InferenceSession,
            sess_options=settings,
            providers=add_providers(settings, self._devices, _compiled(bundle)),
        )
        self._inference: Any = self._open(GRAPH_FILE)
        self._partial: Any = None
        self._lock = Lock()  # sessions may be used by threads of their own

    def open_session(self) -> OrtSession:
        from edge_spec.runtimes.ort.session import OrtSession

        return OrtSession(self._inference, self.config, self._open_partial)

    def close(self) -> None:
        self._inference = self._partial = None

    def _open_partial(self) -> Any:
        """Loads it once. Raises UsageError where the bundle has none."""
        if PARTIAL_FILE not in self._bundle.manifest.files:
            raise UsageError(
                f"{self._bundle.path} was exported without {PARTIAL_FILE}: the model cannot draft "
                "for itself",
                remedy="Export it again.",
            )
        with self._lock:
            if self._partial is None:
                self._partial = self._open(PARTIAL_FILE)
            return self._partial

    def _open(self, name: str) -> Any:
        graph = self._bundle.file(name)
        try:
            session = self._load(graph)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise BundleError(
                f"onnxruntime cannot load {graph}: {error}",
                remedy="Export the model again, or update onnxruntime.",
            ) from error
        require_started(session, self._devices)
        return session


def _compiled(bundle: Bundle) -> Path:
    """Where providers keep what they make of these files; the manifest has the hashes of all."""
    digest = sha256_file(bundle.path / MANIFEST)[:16]
    return cache_directory() / "compiled" / f"{bundle.manifest.name}-{digest}-onnxruntime"


class OrtRuntime:
    name = "ort"
    reads = "onnx"

    def open(self, source: Bundle, options: RuntimeOptions) -> OrtModel:
        """On other devices than the CPU a few scores are compared with the CPU's first, for which
        it loads the model, too. Raises UsageError, BundleError, DeviceError."""
        devices = choose(import_onnxruntime(), options.providers)
        if all(device.name == CPU for device in devices):
            return OrtModel(source, options)
        from edge_spec.runtimes.ort import trial

        on_cpu = OrtModel(source, replace(options, providers=()))
        expected = trial.scores(on_cpu)
        on_cpu.close()
        model = OrtModel(source, options)
        names = ", ".join(device.name for device in devices)
        trial.require_same(trial.scores(model), expected, names)
        return model

    def devices(self, options: RuntimeOptions) -> list[Device]:
        from edge_spec.runtimes.ort.listing import listed

        return list(listed())

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.ort.memory import bundle_memory

        return bundle_memory(source, options, num_tokens)
