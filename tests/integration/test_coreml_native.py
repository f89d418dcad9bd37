"""Core ML on a Mac, with only the calls into it replaced by numpy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError, EdgeSpecError, SessionError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.coreml import CoreMlRuntime
from edge_spec.runtimes.coreml import native as native_module
from edge_spec.runtimes.coreml.native import (
    import_coremltools,
    read_specification,
    signatures_of_spec,
)
from fixtures.coreml_in_numpy import NumpyProgram
from fixtures.mil_in_numpy import read_function


def refused(error: type[EdgeSpecError], call: Callable[[], Any], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


class PretendedModel:
    """What coremltools' CompiledMLModel does on a Mac, in numpy; its state is shared by all
    functions, as Core ML's is hoped to be."""

    loaded: list[tuple[str, str]] = []  # noqa: RUF012
    fault = ""

    def __init__(self, path: str, compute_units: Any, function_name: str) -> None:
        if self.fault == "load":
            raise RuntimeError("the framework\nsays no")
        self.loaded.append((function_name, compute_units.name))
        package = Path(path)
        spec = read_specification(package)
        signatures = signatures_of_spec(spec)
        self._function = function_name
        self._program = NumpyProgram(signatures, lambda name: read_function(package, spec, name))

    def make_state(self) -> Any:
        return PretendedState(self._program)

    def predict(self, data: Any, state: Any) -> Any:
        if self.fault == "predict":
            raise RuntimeError("the unit\nis busy")
        data["mask"] = data["mask"].astype(np.float32)  # as coremltools does, in place
        return self._program.predict(self._function, data, state.arrays)


class PretendedState:
    def __init__(self, program: NumpyProgram) -> None:
        self.arrays = program.make_state()

    def read_state(self, name: str) -> np.ndarray:
        return self.arrays[name].astype(np.float16)

    def write_state(self, name: str, value: np.ndarray) -> None:
        assert value.dtype == np.float16
        self.arrays[name][...] = value


class MLGPUComputeDevice:
    """By its name, as coremltools has it."""


class MLNeuralEngineComputeDevice:
    pass


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[PretendedModel]:
    """A Mac with macOS 15, of which only Core ML's own calls are pretended."""
    coremltools = import_coremltools()
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_module, "this_system", lambda: ("darwin", "15.5"))
    monkeypatch.setattr(coremltools.models, "CompiledMLModel", PretendedModel)
    monkeypatch.setattr(coremltools.models.utils, "compile_model", shutil.copytree)
    monkeypatch.setattr(PretendedModel, "loaded", [])
    monkeypatch.setattr(PretendedModel, "fault", "")
    devices = [MLGPUComputeDevice(), MLNeuralEngineComputeDevice()]
    monkeypatch.setattr(
        coremltools.models.MLModel, "get_available_compute_devices", lambda: devices
    )
    return PretendedModel


@pytest.mark.parametrize(
    ("variant", "compute", "device", "units"),
    [
        ("llama", "gpu", (), "CPU_AND_GPU"),
        ("qwen3", "ane", (), "CPU_AND_NE"),
        ("llama", "gpu", ("ANE",), "CPU_AND_NE"),
        ("llama", "gpu", ("cpu",), "CPU_ONLY"),
        ("llama", "gpu", ("all",), "ALL"),
    ],
)
def test_functions_are_loaded_once_when_they_are_used_on_the_units_that_were_asked_for(
    variant: str,
    compute: str,
    device: tuple[str, ...],
    units: str,
    packaged: Callable[..., Bundle],
    native: type[PretendedModel],
) -> None:
    model = CoreMlRuntime().open(packaged(variant, compute), RuntimeOptions(providers=device))
    assert native.loaded == []
    for _ in range(2):
        session = model.open_session()
        session.prefill([1, 2])
        session.forward(TokenTree.chain(3))
    assert sorted(native.loaded) == [("rows_1", units), ("rows_4", units)]


@pytest.mark.usefixtures("native")
def test_a_package_is_compiled_once(packaged: Callable[..., Bundle], tmp_path: Path) -> None:
    for _ in range(2):
        CoreMlRuntime().open(packaged(), RuntimeOptions())
        (compiled,) = (tmp_path / "cache" / "compiled").glob("*-coreml")
        (compiled / "model.mlmodelc" / "mark").touch(exist_ok=True)
    assert (compiled / "model.mlmodelc" / "mark").exists()
    assert {path.name for path in compiled.iterdir()} == {"model.mlmodelc", "entry.json"}


def test_what_core_ml_raises_is_one_line_with_a_remedy(
    packaged: Callable[..., Bundle], native: type[PretendedModel]
) -> None:
    model = CoreMlRuntime().open(packaged(), RuntimeOptions())
    native.fault = "load"
    refused(DeviceError, model.open_session, "cannot load prefill_64|cannot load rows_1")
    native.fault = ""
    session = model.open_session()
    session.prefill([1, 2, 3])
    native.fault = "predict"
    refused(SessionError, lambda: session.prefill([4]), "failed to run rows_1: the unit is busy")
    native.fault = ""
    session.prefill([4])
    assert session.length == 4


@pytest.mark.usefixtures("native")
def test_units_are_listed_as_a_device_is_asked_for() -> None:
    listed = CoreMlRuntime().devices(RuntimeOptions())
    assert [(each.name, each.kind) for each in listed] == [("gpu", "gpu"), ("ane", "npu")]
