"""Opens static bundles for the NPU: compiles their graphs once, and tries them once."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError
from edge_spec.models.bundle import MANIFEST, Bundle
from edge_spec.runtimes.openvino.library import NpuDevice, import_openvino, last_line
from edge_spec.runtimes.openvino.memory import require_npu_memory
from edge_spec.runtimes.static.onnx_program import PAST, OnnxProgram, OpenedGraphs
from edge_spec.runtimes.static.session import Interruption, StaticModel, config_of
from edge_spec.storage.atomic import atomic_directory, cache_directory, sha256_file, single_flight

_ENTRY = "entry.json"
_MAX_ENTRY_BYTES = 1_000_000

_log = logging.getLogger(__name__)


class CompiledGraphs:
    """The entry of one bundle and one kind of device.

    key: all that compiled graphs depend on, as JSON has it. An entry of another key, such as that
    of an older driver, is removed when it is met, and so is a damaged one.
    """

    def __init__(self, bundle: Bundle, device: str, key: Mapping[str, Any]) -> None:
        self._bundle = bundle
        digest = sha256_file(bundle.path / MANIFEST)
        self._key = {**key, "bundle": digest}
        self.directory = cache_directory() / "compiled" / f"{digest[:16]}-openvino-{device}"

    def get(self, compile_all: Callable[[], Mapping[str, bytes]]) -> dict[str, bytes]:
        """Returns the graphs by their functions' names, from the disk or compiled now, by one
        process at a time. Raises StorageError, and what `compile_all` raises; nothing is kept
        then."""
        with single_flight(self.directory, self._tell_wait):
            found = self._read()
            if found is None:
                _log.warning("compiling %s for the NPU (once)", self._bundle.path)
                found = dict(compile_all())
                self._write(found)
        return found

    def drop(self, why: object) -> None:
        """Removes the entry and says why."""
        _log.warning("%s is removed: %s", self.directory, " ".join(str(why).split()))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read(self) -> dict[str, bytes] | None:
        if not self.directory.is_dir():
            return None
        try:
            with (self.directory / _ENTRY).open("rb") as file:
                entry = json.loads(file.read(_MAX_ENTRY_BYTES))
            if entry["key"] != self._key:
                found, wanted = entry["key"], self._key
                others = [name for name in wanted if found.get(name) != wanted[name]]
                made_for = ", ".join(f"{name} {found.get(name)}" for name in others)
                self.drop(f"it was compiled for {made_for}")
                return None
            return {
                name: _checked(self.directory, name, digest)
                for name, digest in entry["graphs"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.drop(f"it is damaged ({error!r:.200})")
        return None

    def _write(self, graphs: Mapping[str, bytes]) -> None:
        digests = {name: sha256(content).hexdigest() for name, content in graphs.items()}
        with atomic_directory(self.directory) as work:
            for name, content in graphs.items():
                _file(work, name).write_bytes(content)
            entry = {"key": self._key, "graphs": digests}
            (work / _ENTRY).write_text(json.dumps(entry, indent=1), encoding="utf-8")

    def _tell_wait(self) -> None:
        _log.warning("waiting for another process that compiles %s", self._bundle.path)


def _file(directory: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"a graph called {name!r}")
    return directory / f"{name}.blob"


def _checked(directory: Path, name: str, digest: str) -> bytes:
    """OpenVINO takes a graph of which a byte was flipped. Raises ValueError, OSError."""
    content = _file(directory, name).read_bytes()
    if sha256(content).hexdigest() != digest:
        raise ValueError(f"{name} has changed")
    return content


_ANOTHER = "Choose another --device, or export another static bundle."
_TREE = (-1, 0, 0, 2)  # so that masks and positions are tried, too
# Of the scores' deviation: float16 is off by less than a tenth of it, a wrong mask, position or
# matrix by about 1.
_TOLERANCE = 0.25


def open_for_npu(bundle: Bundle, options: RuntimeOptions, device: NpuDevice) -> StaticModel:
    """bundle: of fixed shapes. Raises UsageError for a context beyond its cache, BundleError,
    DeviceMemoryError for more than the NPU may map, DeviceError where graphs cannot
    be compiled or the NPU computes them wrong."""
    config = config_of(bundle, options)
    opened = OpenedGraphs.of(bundle)
    require_npu_memory(bundle, device)
    kept = CompiledGraphs(bundle, f"npu-{device.runs_on.lower()}", device.key)

    def load() -> dict[str, Any]:
        """Raises RuntimeError."""
        contents = kept.get(lambda: _compiled(bundle, opened, device))
        return {name: device.load(content) for name, content in contents.items()}

    try:
        graphs = load()
    except RuntimeError as error:  # of a graph that is whole, and that this machine refuses
        kept.drop(last_line(error))
        graphs = load()
    program = OnnxProgram(NpuGraphs(graphs.__getitem__), opened.signatures)
    return StaticModel(program, opened.layout, config)


def _compiled(bundle: Bundle, opened: OpenedGraphs, device: NpuDevice) -> dict[str, bytes]:
    """Raises DeviceError."""
    compiled = {}
    for function, name in opened.files.items():
        path = str(bundle.file(name))
        try:
            compiled[function] = device.compile(path)
        except RuntimeError as error:
            raise DeviceError(
                f"openvino cannot compile {path} for the NPU: {last_line(error)}", remedy=_ANOTHER
            ) from error
    _require_right(bundle, opened, compiled, device)
    return {name: _exported(each) for name, each in compiled.items()}


def _exported(compiled: Any) -> bytes:
    """Raises DeviceError."""
    stream = BytesIO()
    try:
        compiled.export_model(stream)
    except RuntimeError as error:
        raise DeviceError(
            f"openvino cannot keep what it compiled for the NPU: {last_line(error)}",
            remedy="Update openvino and the NPU's driver, or choose another --device.",
        ) from error
    return stream.getvalue()


def _require_right(
    bundle: Bundle, opened: OpenedGraphs, compiled: Mapping[str, Any], device: NpuDevice
) -> None:
    """Compares a few scores with those of the CPU. Raises DeviceError."""

    def on_cpu(function: str) -> Any:
        path = str(bundle.file(opened.files[function]))
        return device.core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    engines = [NpuGraphs(compiled.__getitem__), NpuGraphs(on_cpu)]
    programs = [OnnxProgram(engine, opened.signatures) for engine in engines]
    models = [StaticModel(each, opened.layout, bundle.config) for each in programs]
    found, expected = (_scores(each) for each in models)
    difference = float(np.abs(found - expected).max() / expected.std())
    if not difference <= _TOLERANCE:  # also where there are NaN
        raise DeviceError(
            f"the NPU computes {bundle.path} wrong: scores are off by {difference:.2g} of their "
            "deviation",
            remedy="Update openvino and the NPU's driver, or choose another --device.",
        )


def _scores(model: StaticModel) -> np.ndarray:
    """Returns [rows, vocab] of a tree after a short prompt."""
    rows = min(len(_TREE), model.config.context_length, model.capabilities.max_rows)
    prompt = min(8, model.config.context_length - rows)
    random = np.random.RandomState(0)
    tokens = random.randint(0, model.config.vocab_size, prompt + rows).astype(np.int32)
    session: Session = model.open_session()
    try:
        session.prefill(tokens[:prompt].tolist())
        tree = TokenTree(
            tokens[prompt:], np.array(_TREE[:rows], np.int32), np.ones(rows, np.float32)
        )
        return session.forward(tree).logits
    finally:
        session.close()


class NpuGraphs:
    """compiled: returns OpenVINO's CompiledModel of a function, asked for when it is first run.

    The states of the session that ran last stay bound where they are; all else is copied into
    arrays of the request.
    """

    def __init__(self, compiled: Callable[[str], Any]) -> None:
        self._compiled = compiled
        self._requests: dict[str, _Request] = {}
        self._lock = Lock()  # sessions may be used by threads of their own

    def run(
        self, function: str, inputs: Mapping[str, np.ndarray], interruption: Interruption
    ) -> Mapping[str, np.ndarray]:
        """Raises SessionError for a pass that was interrupted, DeviceError where the NPU fails or
        is gone, as after a sleep."""
        with self._lock:
            try:
                if function not in self._requests:
                    self._requests[function] = _Request(self._compiled(function))
                return self._requests[function].run(inputs, interruption)
            except RuntimeError as error:  # OpenVINO's own are of no other class
                interruption.require_none()
                self._requests.pop(function, None)
                raise DeviceError(
                    f"the NPU failed to run {function}: {last_line(error)}",
                    remedy="Ask again; if it stays, start again, or choose another --device.",
                ) from error


class _Request:
    """An infer request and the arrays that are bound to it."""

    def __init__(self, compiled: Any) -> None:
        self._tensor = import_openvino().Tensor
        self._request = compiled.create_infer_request()
        self._outputs = [value.any_name for value in compiled.outputs]
        self._bound: dict[str, np.ndarray] = {}

    def run(
        self, inputs: Mapping[str, np.ndarray], interruption: Interruption
    ) -> dict[str, np.ndarray]:
        """Returns copies: another session's pass writes the request's own."""
        for name, array in inputs.items():
            if name.startswith(PAST):
                if self._bound.get(name) is not array:
                    self._bind(name, array)
            elif name in self._bound:
                self._bound[name][...] = array
            else:
                self._bind(name, array.copy())
        with interruption.ended_by(self._request.cancel):
            self._request.start_async()
            self._request.wait()
        return {name: self._request.get_tensor(name).data.copy() for name in self._outputs}

    def _bind(self, name: str, array: np.ndarray) -> None:
        self._request.set_tensor(name, self._tensor(array, shared_memory=True))
        self._bound[name] = array
