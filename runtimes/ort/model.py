"""Loads a bundle into onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_spec.core.model import Capabilities, Forward, RuntimeOptions
from edge_spec.core.shared_pass import PassPart
from edge_spec.errors import BundleError, DeviceError, EdgeSpecError, SessionError, UsageError
from edge_spec.models.bundle import MANIFEST, Bundle
from edge_spec.placement.devices import CPU, Device
from edge_spec.placement.machine import available_cores
from edge_spec.runtimes.ort.device_place import Place, place_of, shares_weights
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
    import numpy as np
    from onnxruntime import OrtValue

    from edge_spec.placement.memory import Memory
    from edge_spec.runtimes.ort.device_model import DeviceSessions
    from edge_spec.runtimes.ort.device_session import DeviceSession
    from edge_spec.runtimes.ort.device_weights import DeviceMatrices
    from edge_spec.runtimes.ort.graph_forms import GraphForm
    from edge_spec.runtimes.ort.growing import GrowingSession
    from edge_spec.runtimes.ort.joint import JointGraphs
    from edge_spec.runtimes.ort.session import OrtSession
    from edge_spec.runtimes.ort.trial import TrialScores

GRAPH_FILE = "model.onnx"
PARTIAL_FILE = "partial.onnx"  # the same weights; every sublayer is optional
_STOPS_SPINNING = "session.force_spinning_stop"  # threads that wait for work, after each pass
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # of a graph in memory
_NOTHING: Mapping[str, np.ndarray | OrtValue] = MappingProxyType({})


class _Weights:
    """How the graphs of one bundle are loaded: their form, devices and threads.

    form: of the whole model's graph; None: as it is in the bundle, which suits the CPU.
    place: where sessions keep keys and values; None: where the options say.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: RuntimeOptions,
        form: GraphForm | None = None,
        place: Place | None = None,
        **settings: bool,
    ) -> None:
        """settings: attributes of onnxruntime's SessionOptions."""
        onnxruntime = import_onnxruntime()
        self._devices = choose(onnxruntime, options.providers)
        self._names = [device.name for device in self._devices]
        self._on_cpu = all(name == CPU for name in self._names)
        self.form = form
        self._segments = segment_files(bundle) if self._on_cpu and form is None else []
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
        compiled = _compiled(bundle)

        def providers(settings: Any) -> Any:
            return add_providers(settings, self._devices, compiled)

        self._providers = providers
        self._load = partial(
            onnxruntime.InferenceSession,
            providers=self._providers(self._options),
            enable_fallback=0,  # else it prints why a device fails, and takes the CPU
        )
        self._matrices: DeviceMatrices | None = None  # that graphs share
        self._held: list[Any] = []  # weights of graphs, which read them where they are
        self.place = place or place_of(self._devices)

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
        if self.form is not None:
            return self.open_form(self.form, threads)
        if not self._segments:
            return self.open(GRAPH_FILE, threads)
        open_one = partial(self.open, threads=threads)
        with ThreadPoolExecutor(len(self._segments) if threads is None else 1) as loaders:
            return SegmentedInference(self.bundle, list(loaders.map(open_one, self._segments)))

    def open_form(self, form: GraphForm, threads: int | None = None) -> Any:
        """The whole model in another form. Raises BundleError, DeviceError."""
        from edge_spec.runtimes.ort.graph_forms import formed_graph

        path = self.bundle.file(GRAPH_FILE)
        made = formed_graph(path, self.config, form)
        given: Mapping[str, np.ndarray | OrtValue] = made.initializers
        if self.place is not None and shares_weights(self.place, self.config):
            from edge_spec.runtimes.ort.device_weights import DeviceMatrices

            self._matrices = self._matrices or DeviceMatrices(self.place, path)
            try:
                given = {**given, **self._matrices.given(made)}
            except RuntimeError as error:  # where they do not fit
                raise self._load_error(error, path) from error
        return self.open(GRAPH_FILE, threads, made.graph, given)

    def release(self) -> None:
        """Drops what only graphs that are still to be loaded would share."""
        self._matrices = None

    def open_beside(self, graph: bytes) -> Any:
        """A graph without weights, where the model is. Raises BundleError, DeviceError."""
        return self.open(GRAPH_FILE, threads=1, made=graph)

    def open(
        self,
        name: str,
        threads: int | None = None,
        made: bytes | None = None,
        initializers: Mapping[str, np.ndarray | OrtValue] = _NOTHING,
    ) -> Any:
        """An InferenceSession; threads: if not as many as were asked for. made: of the file, a
        graph over the same weights, but those that `initializers` has. Raises BundleError,
        DeviceError."""
        graph = self.bundle.file(name)
        options = self._options
        if threads is not None or made is not None:
            options = self._chosen()
            self._providers(options)  # those of packages are part of the options
            options.intra_op_num_threads = threads or options.intra_op_num_threads
        if made is not None:
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(graph.parent))
            options.add_session_config_entry(_STOPS_SPINNING, "1")
        if initializers:
            value = import_onnxruntime().OrtValue
            given = [
                each if isinstance(each, value) else value.ortvalue_from_numpy(each)
                for each in initializers.values()
            ]
            options.add_external_initializers(list(initializers), given)
            self._held += given
        try:
            session = self._load(made or graph, sess_options=options)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise self._load_error(error, graph) from error
        if not self._on_cpu:
            from edge_spec.runtimes.ort.listing import fault

            require_started(session, self._devices, fault)
            require_on_device(session, self._devices)
        return session

    def _load_error(self, error: Exception, graph: Path) -> EdgeSpecError:
        known = None if self._on_cpu else start_error(self._names, str(error))
        return known or BundleError(
            f"onnxruntime cannot load {graph}: {error}",
            remedy="Export the model again, or update onnxruntime.",
        )


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
        self._weights = _Weights(bundle, options, form, place)
        from edge_spec.runtimes.ort.passes import MAX_ROWS

        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=form is None or form.takes_trees,
            rollback=True,
            hidden_states=True,
        )
        self.form = form
        self.config = self._weights.config
        self._inference: Any = self._weights.open_whole()
        _require_described(self._inference, bundle)
        self._partial: Any = None
        self._lock = Lock()  # sessions may be used by threads of their own
        self._fewer = FewerThreads(
            self._weights.threads, self._inference, self._reopen, self._weights.count_bytes
        )
        self._joint: JointGraphs | None = None
        self._device: DeviceSessions | None = None
        if self._weights.place is not None:
            from edge_spec.runtimes.ort.device_model import DeviceSessions

            self._device = DeviceSessions(self._weights, self._inference)

    def open_session(self) -> OrtSession | DeviceSession:
        if self._device is not None:
            return self._device.open()
        from edge_spec.runtimes.ort.session import OrtSession

        return OrtSession(self._inference, self.config, self._open_partial, self._fewer)

    def node_placement(self) -> dict[str, dict[str, int]]:
        """Counts operators by the provider that took them: TellsNodePlacement."""
        return count_nodes(self._inference)

    def prepare_sharing(self, num_sessions: int) -> int:
        from edge_spec.runtimes.ort.joint import JointGraphs

        if self._weights.threads is None or self._weights.form is not None or self._device:
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
        self._inference = self._partial = self._device = None
        self._weights.release()

    def _open_joint(self, num_places: int) -> Any:
        from edge_spec.runtimes.ort.joint_graph import joint_graph

        graph = self._weights.bundle.file(GRAPH_FILE)
        return self._weights.open(GRAPH_FILE, made=joint_graph(graph, num_places))

    def _reopen(self, threads: int) -> Any:
        return self._weights.open_whole(threads)

    def _open_partial(self) -> Any:
        """Loads it once. Raises UsageError where the bundle has none, or the cache is another."""
        bundle = self._weights.bundle
        if self._weights.form is not None:
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


def _open(
    bundle: Bundle, options: RuntimeOptions, form: GraphForm | None = None
) -> OrtModel | GrowingModel:
    growing = bundle.manifest.kv_cache == "growing"
    return GrowingModel(bundle, options) if growing else OrtModel(bundle, options, form)


def _open_right(
    bundle: Bundle,
    options: RuntimeOptions,
    form: GraphForm | None,
    expected: TrialScores,
    devices: str,
) -> OrtModel | GrowingModel:
    """Raises DeviceError, SessionError where the scores are not those of the CPU."""
    from edge_spec.runtimes.ort import trial

    model = _open(bundle, options, form)
    try:
        if not trial.require_same(trial.scores(model), expected, devices):
            model.capabilities = replace(model.capabilities, trees=False)
    except BaseException:
        model.close()
        raise
    return model


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
        from edge_spec.runtimes.ort import graph_forms, trial

        on_cpu = _open(source, replace(options, providers=()), graph_forms.REFERENCE)
        expected = trial.scores(on_cpu)
        on_cpu.close()
        names = ", ".join(device.name for device in devices)
        providers = [device.provider for device in devices]
        forms = graph_forms.forms_for(providers, source.config)
        for form in forms[:-1]:
            with suppress(DeviceError, SessionError):  # such as where float16 overflows
                return _open_right(source, options, form, expected, names)
        return _open_right(source, options, forms[-1], expected, names)

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
