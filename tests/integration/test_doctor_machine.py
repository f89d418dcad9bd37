"""`edge-spec doctor` examines the machine and what edge-spec keeps on it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from edge_spec.cli.output import table_lines
from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.diagnostics.doctor.report import Finding, Report, Severity
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.devices import Device

CPU = Device("ort", "cpu", "cpu", "the processor")


def examined(
    devices: tuple[Device, ...] = (CPU,), model: str = "nowhere", **options: str
) -> Report:
    """By itself of a model that is not there, so that only the machine is looked at."""
    asked = AskedOptions(**options)  # type: ignore[arg-type]
    return diagnose(model, asked, lambda what, fraction: None, devices=lambda: list(devices))


def found(report: Report, group: str, check: str) -> Finding:
    return next(each for each in report.findings if (each.group, each.check) == (group, check))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_devices_and_why_others_cannot_be_used() -> None:
    missing = Device("coreml", None, None, "", fault="it needs macOS")
    broken = Device("llamacpp", "cuda0", "gpu", "A GPU", fault="the driver is too old")
    report = examined((missing, broken, CPU))
    told = [(each.level, each.found) for each in report.findings if each.check == "devices"]
    assert told == [
        (Severity.NOTE, "not coreml: it needs macOS"),
        (Severity.WARNING, "llamacpp cuda0: the driver is too old"),
        (Severity.OK, "ort cpu: the processor"),
    ]
    alone = found(examined((missing,)), "machine", "devices")
    assert (alone.level, alone.found) == (Severity.FAULT, "none can be used")


@pytest.mark.parametrize("place", ["cache", "cache/below"])
def test_a_cache_that_is_no_directory_is_told(
    cache: Path, gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A model that has to be converted first cannot be used."""
    cache.write_text("a file")
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(cache.parent / place))
    report = examined(model=str(gguf()), runtime="ort")
    disk = found(report, "machine", "disk")
    assert disk.level is Severity.WARNING and disk.found.startswith(f"{cache} is no directory")
    conversion = found(report, "target", "conversion")
    assert conversion.level is Severity.FAULT and "EDGE_SPEC_CACHE" in conversion.remedy


def test_what_is_kept_is_counted_and_nothing_of_it_changed(cache: Path) -> None:
    file = cache / "answers/x.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3_000_000))
    assert found(examined(), "caches", "kept").found == "answers 3 MB"
    assert file.stat().st_size == 3_000_000


@pytest.mark.parametrize("key", ["general__alignment", "general__architecture"])
def test_what_a_file_says_is_cut(tiny: ModuleType, tmp_path: Path, key: str) -> None:
    path = tiny.write_gguf(tiny.build(), tmp_path / "model.gguf", **{key: "x" * 200_000})
    report = examined(model=str(path))
    assert report.verdict == "faults"
    assert all(len(each.found) < 2000 for each in report.findings)
    assert any("xxx" in each.found for each in report.findings)


def test_what_a_model_says_never_reaches_the_terminal_as_a_command() -> None:
    lines = table_lines([("", ("tokens", "eos \x1b[2J\x07!")), ("red", ("[bold]", "x" * 300))])
    first, second = lines
    assert first.split() == ["tokens", "eos", "?[2J?!"]
    assert second.split() == ["[bold]", "x" * 300]  # a line of a pipe is not folded
