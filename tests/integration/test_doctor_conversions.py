"""`edge-spec doctor` says of a model that has to be converted first whether it can be."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.diagnostics.doctor.report import Finding, Report, Severity
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters import optimum as export
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.devices import Device
from edge_spec.models.model_plan import prepare_model
from edge_spec.models.source import Source
from fixtures.silence import quiet

GPT2 = Path(__file__).parents[1] / "fixtures/growing/gpt2"  # as optimum has converted it


def examined(model: Path, runtime: str = "auto") -> Report:
    devices = [Device("ort", "cpu", "cpu", "the processor")]
    return diagnose(str(model), AskedOptions(runtime=runtime), quiet, devices=lambda: devices)


def found(report: Report, group: str, check: str) -> Finding:
    return next(each for each in report.findings if (each.group, each.check) == (group, check))


def faults(report: Report) -> list[tuple[str, str]]:
    return [(each.group, each.check) for each in report.findings if each.level is Severity.FAULT]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runtimes, "AUTO_RUNTIMES", (("ort", "json"), ("llamacpp", "json")))
    return tmp_path / "cache"


@pytest.fixture
def mixture(tiny: ModuleType, tmp_path: Path) -> Path:
    """A GGUF file of an architecture that only a library knows."""
    model = tiny.build("qwen2")
    model.config["model_type"] = "qwen2moe"
    return Path(tiny.write_gguf(model, tmp_path / "mixture.gguf"))


@pytest.fixture
def gpt2(tiny: ModuleType, tmp_path: Path) -> Path:
    """A Hugging Face directory, as far as anything is read here."""
    path = Path(tiny.write_hf(tiny.build(), tmp_path / "gpt2"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    return path


@pytest.fixture
def optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "version", lambda name: "0.1.0")


@pytest.fixture
def without_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(export, "version", version)


@pytest.fixture
def only_ort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "AUTO_RUNTIMES", (("ort", "json"),))


@pytest.mark.usefixtures("only_ort")
def test_a_gguf_file_that_nothing_installed_can_have_is_a_fault(mixture: Path, cache: Path) -> None:
    report = examined(mixture)
    assert not cache.exists()
    with pytest.raises(UnsupportedModelError) as caught:
        prepare_model(Source(str(mixture), quiet), "auto", quiet)
    assert faults(report) == [("target", "runtime")]
    told = found(report, "target", "runtime")
    assert told.found == caught.value.message
    assert told.remedy.startswith('Run in your checkout of edge-spec: pip install -e ".[llamacpp]"')
    assert not {"memory", "speed"} & {each.group for each in report.findings}


def test_a_gguf_file_that_the_runtime_asked_for_cannot_have_is_a_fault(
    mixture: Path, cache: Path
) -> None:
    report = examined(mixture, runtime="ort")
    assert not cache.exists()
    assert faults(report) == [("target", "runtime")]
    told = found(report, "target", "runtime")
    assert "llama, qwen2, qwen3" in told.remedy


@pytest.mark.usefixtures("optimum")
def test_another_architecture_is_described_before_it_is_converted(gpt2: Path, cache: Path) -> None:
    (gpt2 / "model.safetensors").write_bytes(b"never read")
    report = examined(gpt2)
    assert faults(report) == []
    architecture = found(report, "target", "architecture")
    assert architecture.level is Severity.NOTE
    assert architecture.found == "gpt2, converted by optimum at the first start"
    assert "is converted for ort first" in found(report, "memory", "forecast").found
    assert not cache.exists()


@pytest.mark.usefixtures("without_optimum")
def test_without_optimum_another_architecture_is_a_fault(gpt2: Path) -> None:
    report = examined(gpt2)
    assert faults(report) == [("target", "runtime")]
    told = found(report, "target", "runtime")
    assert "optimum, which is not installed" in told.found
    assert told.remedy == 'Run in your checkout of edge-spec: pip install -e ".[optimum]".'


@pytest.mark.usefixtures("without_optimum")
def test_another_architecture_that_was_converted_needs_optimum_no_more(gpt2: Path) -> None:
    kept = Source(str(gpt2), quiet).cached("onnx", ExportOptions())
    shutil.copytree(GPT2, kept)
    report = examined(gpt2)
    assert faults(report) == []
    assert found(report, "target", "architecture").found.startswith("gpt2, 2 layers, 32 wide")
    assert found(report, "target", "files").found.startswith("Hugging Face")
    assert found(report, "memory", "target").found.startswith("ort: ")
    (kept / "model.onnx.data").write_bytes(b"short")
    assert faults(examined(gpt2)) == [("target", "runtime")]  # nothing here converts it again
