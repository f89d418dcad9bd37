"""What `edge-spec devices` lists, how it prints, and which options name devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.devices import Device, DeviceListing, list_devices
from edge_spec.models.options import LoadOptions

RUNTIMES = """
import os
from edge_spec.core.model import Runtime

class Silent(Runtime):
    name, reads = "silent", "gguf"

class Crashing(Silent):
    def devices(self, options):
        os.abort()

class Failing(Silent):
    def devices(self, options):
        raise OSError("the driver is [bold]too old[/bold]")

class Working(Silent):
    def devices(self, options):
        from edge_spec.models.devices import Device
        return [Device("working", "npu1", "npu", "a chip", 4_000_000_000, 1_000_000_000)]
"""
ENTRY_POINTS = """
[edge_spec.runtimes]
crashing = pretended_runtimes:Crashing
failing = pretended_runtimes:Failing
missing = no_such_library.runtime:Runtime
silent = pretended_runtimes:Silent
working = pretended_runtimes:Working
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with the runtimes above."""
    (tmp_path / "pretended_runtimes.py").write_text(RUNTIMES)
    info = tmp_path / "pretended-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def of(runtime: str, found: list[Device]) -> Device:
    (device,) = [device for device in found if device.runtime == runtime]
    return device


@pytest.mark.usefixtures("third_party")
def test_runtimes_that_crash_fail_or_miss_a_library_are_entries_with_the_reason() -> None:
    found = list_devices()
    assert [device.runtime for device in found] == sorted(device.runtime for device in found)
    working = Device("working", "npu1", "npu", "a chip", 4_000_000_000, 1_000_000_000)
    assert of("working", found) == working
    for runtime, reason in (
        ("crashing", "SIGABRT"),
        ("failing", "the driver is [bold]too old[/bold]"),
        ("missing", "pip install"),
        ("silent", "does not list"),
    ):
        device = of(runtime, found)
        assert reason in (device.fault or "")
        assert (device.name, device.kind, device.free_bytes) == (None, None, None)


@pytest.mark.parametrize("name", ["llamacpp", "ort", "reference"])
def test_every_runtime_here_lists_the_cpu_once(name: str) -> None:
    runtime = runtimes.load_runtime(name)
    assert isinstance(runtime, DeviceListing)
    if name == "llamacpp":
        pytest.importorskip("llama_cpp")
    devices = runtime.devices(RuntimeOptions())
    assert [device.name for device in devices if device.kind == "cpu"].count("cpu") == 1
    assert {device.runtime for device in devices} == {name}


def test_the_reference_refuses_other_devices_before_it_reads() -> None:
    runtime = runtimes.load_runtime("reference")
    with pytest.raises(UsageError, match="reference has no device 'cuda' here"):
        runtime.open(None, RuntimeOptions(providers=("cuda",)))


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":50052", "host:0", "host:65536", "host:123456", "host:x", "a:1:2"),
        *("[::1]:50052", "http://host:1", "host:1 ", "host :1", "host:-1", "host:1\n", "höst:1"),
    ],
)
def test_anything_else_is_refused_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["devices"], ["generate", "Hi"]):
        assert run([*arguments, "--rpc", text]) == 2
        out, err = capsys.readouterr()
        assert "is no address of a server" in err
        assert err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "cpu", "gpu_layers": 10}, "--device cpu contradicts --gpu-layers 10"),
        ({"device": "CPU, cpu", "gpu_layers": 1}, "contradicts --gpu-layers 1"),
        ({"device": "cpu", "rpc": ("a:1",)}, "--device cpu contradicts --rpc"),
        ({"gpu_layers": 0, "rpc": ("a:1",)}, "--gpu-layers 0 contradicts --rpc"),
        ({"rpc": ("a:1", "b:1", "a:1")}, "--rpc names a server twice"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        LoadOptions(**options)


@pytest.mark.parametrize("name", ["ort", "reference"])
def test_servers_are_refused_by_runtimes_without_them(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no option rpc"):
        runtimes.load_runtime(name).open(None, RuntimeOptions(rpc_servers=("a:1",)))
