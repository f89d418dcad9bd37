"""Loads a bundle into onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from edge_spec.core.model import Capabilities, Forward, RuntimeOptions
from edge_spec.core.shared_pass import PassPart
from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import MANIFEST, Bundle
from edge_spec.placement.devices import CPU, Device
from edge_spec.placement.machine import available_cores
from edge_spec.runtimes.ort.devices import (
    ProviderChoice,
    add_providers,
    choose,
    import_onnxruntime,
    require_started,
)
from edge_spec.runtimes.ort.fewer_threads import FewerThreads
from edge_spec.runtimes.ort.node_placement import (
    RECORDS_PLACEMENT,
    count_nodes,
    require_on_device,
)
from edge_spec.runtimes.ort.segments import SegmentedInference, segment_files
from edge_spec.runtimes.ort.start_errors import start_error
from edge_spec.runtimes.ort.starting import require_driver
from edge_spec.storage.atomic import cache_directory, sha256_file

if TYPE_CHECKING:
    from edge_spec.placement.memory import Memory
    from edge_spec.runtimes.ort.growing import GrowingSession
    from edge_spec.runtimes.ort.joint import JointGraphs
    from edge_spec.runtimes.ort.session import OrtSession

GRAPH_FILE = "model.onnx"
PARTIAL_FILE = "partial.onnx"  # the same weights; every sublayer is optional
_STOPS_SPINNING = "session.force_spinning_stop"  # threads that wait for work, after each pass
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # of a graph in memory


class _Weights:
    """How the graphs of one bundle are loaded: their devices and threads."""

    def __init__(self, bundle: Bundle, options: RuntimeOptions, **settings: bool) -> None:
        """settings: attributes of onnxruntime's SessionOptions."""
        onnxruntime = import_onnxruntime()
        self._devices = choose(onnxruntime, options.providers)
        self._names = [device.name for device in self._devices]
        self._on_cpu = all(name == CPU for name in self._names)
        self._segments = segment_files(bundle) if self._on_cpu else []
        takes_turns = options.takes_turns or bool(self._segments)  # segments do, with each other

        def chosen() -> Any:
            """SessionOptions, whose number of threads may still be changed."""
            made = onnxruntime.SessionOptions()
            made.log_severity_level = 3
            for name, value in settings.items():
                setattr(made, name, value)
            if takes_turns:  # waking them for each pass slows a model that runs alone
                made.add_session_config_entry(_STOPS_SPINNING, "1")
            made.add_session_config_entry(RECORDS_PLACEMENT, "1")
            if options.threads is not None:
                made.intra_op_num_threads = options.threads
            return made

        self._chosen, self._options = chosen, chosen()
        self.bundle = bundle
        # Our own graph has a rotation for each position, and the second row of a single one, which
        # does not count (passes.MIN_ATTENDED), needs one, too.
        is_growing = bundle.manifest.kv_cache == "growing"
        longest = bundle.config.context_length - (0 if is_growing else 1)
        length = min(options.context_length or longest, longest)
        self.config = replace(bundle.config, context_length=length)
        self._load = partial(
            onnxruntime.InferenceSession,
            providers=add_providers(self._options, self._devices, _compiled(bundle)),
            enable_fallback=0,  # else it prints why a device fails, and takes the CPU
        )

    @property
    def threads(self) -> int | None:
        """Of a pass on the CPU alone; None where others compute, too."""
        if not self._on_cpu:
            return None
        return self._options.intra_op_num_threads or available_cores()

    def count_bytes(self) -> int:
        """Of the bundle's files."""
        files = (self.bundle.file(name) for name in self.bundle.manifest.files)
        return sum(file.stat().st_size for file in files)

    def open_whole(self, threads: int | None = None) -> Any:
        """The whole model as `open` gives it, its segments at the same time, where it has some.

        With another number of threads, one after the other: that is for a machine that is busy.
        Raises BundleError, DeviceError.
        """
        if not self._segments:
            return self.open(GRAPH_FILE, threads)
        open_one = partial(self.open, threads=threads)
        with ThreadPoolExecutor(len(self._segments) if threads is None else 1) as loaders:
            return SegmentedInference(self.bundle, list(loaders.map(open_one, self._segments)))

    def open(self, name: str, threads: int | None = None, made: bytes | None = None) -> Any:
        """An InferenceSession; threads: if not as many as were asked for. made: of the file, a
        graph over the same weights. Raises BundleError, DeviceError."""
        graph = self.bundle.file(name)
        options = self._options
        if threads is not None or made is not None:
            options = self._chosen()
            options.intra_op_num_threads = threads or options.intra_op_num_threads
        if made is not None:
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(graph.parent))
            options.add_session_config_entry(_STOPS_SPINNING, "1")
        try:
            session = self._load(made or graph, sess_options=options)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            known = None if self._on_cpu else start_error(self._names, str(error))
            raise known or BundleError(
                f"onnxruntime cannot load {graph}: {error}",
                remedy="Export the model again, or update onnxruntime.",
            ) from error
        if not self._on_cpu:
            from edge_spec.runtimes.ort.listing import fault

            require_started(session, self._devices, fault)
            require_on_device(session, self._devices)
        return session


class OrtModel:
    """One InferenceSession, and a second one once a session opens a part of the model.

    Sessions share the weights and the thread pool.
    """

    def __init__(self, bundle: Bundle, options: RuntimeOptions) -> None:
        self._weights = _Weights(bundle, options)
        from edge_spec.runtimes.ort.passes import MAX_ROWS

        self.capabilities = Capabilities(
            max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True
        )
        self.config = self._weights.config
        self._inference: Any = self._weights.open_whole()
        _require_described(self._inference, bundle)
        self._partial: Any = None
        self._lock = Lock()  # sessions may be used by threads of their own
        self._fewer = FewerThreads(
            self._weights.threads, self._inference, self._reopen, self._weights.count_bytes
        )
        self._joint: JointGraphs | None = None

    def open_session(self) -> OrtSession:
        from edge_spec.runtimes.ort.session import OrtSession

        return OrtSession(self._inference, self.config, self._open_partial, self._fewer)

    def node_placement(self) -> dict[str, dict[str, int]]:
        """Counts operators by the provider that took them: TellsNodePlacement."""
        return count_nodes(self._inference)

    def prepare_sharing(self, num_sessions: int) -> int:
        from edge_spec.runtimes.ort.joint import JointGraphs

        if self._weights.threads is None:
            return 1  # not measured on other devices than the CPU
        with self._lock:
            if self._joint is None:
                self._joint = JointGraphs(self.config, self._open_joint, self._weights.count_bytes)
        return self._joint.prepare(num_sessions)

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        assert self._joint is not None
        joining = [(_own(part).passes, part.session.length, part) for part in parts]
        return self._joint.score(joining, num_rows)

    def close(self) -> None:
        self._fewer.close()
        if self._joint is not None:
            self._joint.close()
        self._inference = self._partial = None

    def _open_joint(self, num_places: int) -> Any:
        from edge_spec.runtimes.ort.joint_graph import joint_graph

        graph = self._weights.bundle.file(GRAPH_FILE)
        return self._weights.open(GRAPH_FILE, made=joint_graph(graph, num_places))

    def _reopen(self, threads: int) -> Any:
        return self._weights.open_whole(threads)

    def _open_partial(self) -> Any:
        """Loads it once. Raises UsageError where the bundle has none."""
        bundle = self._weights.bundle
        if PARTIAL_FILE not in bundle.manifest.files:
            raise UsageError(
                f"{bundle.path} was exported without {PARTIAL_FILE}: the model cannot draft "
                "for itself",
                remedy="Export it again.",
            )
        with self._lock:
            if self._partial is None:
                opened = self._weights.open(PARTIAL_FILE)
                _require_described(opened, bundle)
                self._partial = opened
            return self._partial


def _own(part: PassPart) -> OrtSession:
    from edge_spec.runtimes.ort.session import OrtSession

    assert isinstance(part.session, OrtSession)
    return part.session


def _require_described(inference: Any, bundle: Bundle) -> None:
    """Raises BundleError where the graph is not as the manifest says, by which memory is taken."""
    config = bundle.config
    parts = [(layer, part) for layer in range(config.num_layers) for part in ("key", "value")]
    caches = {
        f"past.{layer}.{part}": (config.num_kv_heads, config.head_dim) for layer, part in parts
    }
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
    """A graph whose keys and values grow with every pass (growing.py); chains only.

    Sessions share the weights and the thread pool. Raises BundleError for another kind of graph.
    """

    def __init__(self, bundle: Bundle, options: RuntimeOptions) -> None:
        # Planned memory is kept for every shape, and each pass has a shape of its own here.
        weights = _Weights(bundle, options, enable_mem_pattern=False)
        from edge_spec.runtimes.ort.growing import MAX_ROWS
        from edge_spec.runtimes.ort.growing_graph import GrowingGraph

        self.capabilities = Capabilities(
            max_rows=MAX_ROWS, trees=False, rollback=True, hidden_states=False
        )
        self.config = weights.config
        self._inference: Any = weights.open(GRAPH_FILE)
        self._graph = GrowingGraph.of(self._inference, bundle.file(GRAPH_FILE))
        if self._graph.vocab_size != self.config.vocab_size:
            raise BundleError(
                f"{bundle.path} scores {self._graph.vocab_size} tokens, its manifest says "
                f"{self.config.vocab_size}",
                remedy="Export the model again.",
            )

    def open_session(self) -> GrowingSession:
        from edge_spec.runtimes.ort.growing import GrowingSession

        return GrowingSession(self._inference, self._graph, self.config)

    def node_placement(self) -> dict[str, dict[str, int]]:
        """Counts operators by the provider that took them: TellsNodePlacement."""
        return count_nodes(self._inference)

    def close(self) -> None:
        self._inference = None


def _open(bundle: Bundle, options: RuntimeOptions) -> OrtModel | GrowingModel:
    growing = bundle.manifest.kv_cache == "growing"
    return GrowingModel(bundle, options) if growing else OrtModel(bundle, options)


def _compiled(bundle: Bundle) -> Path:
    """Where providers keep what they make of these files; the manifest has the hashes of all."""
    digest = sha256_file(bundle.path / MANIFEST)[:16]
    return cache_directory() / "compiled" / f"{bundle.manifest.name}-{digest}-onnxruntime"


class OrtRuntime:
    name = "ort"
    reads = "onnx"

    def open(self, source: Bundle, options: RuntimeOptions) -> OrtModel | GrowingModel:
        """Compares, on other devices than the CPU, a few scores with the CPU's first, for which
        it loads the model, too. Raises UsageError, BundleError, DeviceError."""
        options.require_only(self.name, "threads", "providers", "context_length")
        devices = self._devices(options.providers)
        if all(device.name == CPU for device in devices):
            return _open(source, options)
        from edge_spec.runtimes.ort import trial

        on_cpu = _open(source, replace(options, providers=()))
        expected = trial.scores(on_cpu)
        on_cpu.close()
        model = _open(source, options)
        names = ", ".join(device.name for device in devices)
        if not trial.require_same(trial.scores(model), expected, names):
            model.capabilities = replace(model.capabilities, trees=False)
        return model

    def require_devices(self, providers: Sequence[str]) -> None:
        """Raises as DeviceScreeningRuntime does."""
        self._devices(providers)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        from edge_spec.runtimes.ort.listing import listed

        return list(listed())

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.ort.memory import bundle_memory

        return bundle_memory(source, options, num_tokens)

    def _devices(self, providers: Sequence[str]) -> list[ProviderChoice]:
        """Those of these names, whose driver is there. Raises UsageError, DeviceError."""
        onnxruntime = import_onnxruntime()
        chosen = choose(onnxruntime, providers)
        require_driver(onnxruntime, [choice.provider for choice in chosen])
        return chosen
