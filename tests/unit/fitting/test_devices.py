"""What `edge-spec devices` lists, how it prints, and which options name devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core import entry_points
from edge_spec.core.endpoint import Endpoint
from edge_spec.core.isolated import IsolatedError
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import UsageError
from edge_spec.fitting import devices as devices_module
from edge_spec.fitting.devices import Device, DeviceListing, devices_of, list_devices
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions

MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"

RUNTIMES = """
import os

class Silent:
    name, reads = "silent", "gguf"

class Crashing(Silent):
    def devices(self, options):
        os.abort()

class Failing(Silent):
    def devices(self, options):
        raise OSError("the driver is [bold]too old[/bold]")

class Working(Silent):
    def devices(self, options):
        from edge_spec.fitting.devices import Device
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


def test_the_processor_is_listed_by_the_reference() -> None:
    (device,) = devices_of("reference")
    assert (device["name"], device["kind"], device["fault"]) == ("cpu", "cpu", None)
    if sys.platform == "linux":
        assert 0 < device["free_bytes"] < device["total_bytes"]


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
    with pytest.raises(UsageError, match="reference has no device cuda"):
        runtime.open(None, RuntimeOptions(providers=("cpu", "cuda")))


@pytest.mark.usefixtures("third_party")
def test_json_is_one_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is made in this process: others look at how each runtime is asked in one."""
    monkeypatch.setattr(devices_module, "isolated", in_this_process)
    assert run(["devices", "--json"]) == 0
    out, err = capsys.readouterr()
    devices = json.loads(out)["devices"]
    assert of("working", [Device(**device) for device in devices]).name == "npu1"
    assert err == ""


@pytest.mark.slow  # asks every runtime in a process
@pytest.mark.usefixtures("third_party")
def test_a_line_of_a_pipe_is_a_device_and_is_never_folded() -> None:
    done = printed()
    lines = done.stdout.splitlines()
    assert done.stderr == "" and "\x1b" not in done.stdout
    runtimes = {"runtime", *entry_points.names("runtimes")}
    assert {line.split()[0] for line in lines} == runtimes
    (line,) = [line for line in lines if line.startswith("working")]
    assert "npu1" in line and "1,000 MB free of 4,000 MB" in line and "a chip" in line
    assert any("the driver is [bold]too old[/bold]" in line for line in lines)  # no markup
    assert any("pip install" in line for line in lines)


@pytest.mark.slow  # asks every runtime in a process
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.usefixtures("third_party")
def test_a_narrow_terminal_folds_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = in_terminal(columns=50)
    assert "\x1b[31m" not in text
    lines = text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= 50
    assert "npu1" in text and "…" not in text


def in_this_process(work: Any, runtime: str, **how: Any) -> Any:
    """Of the runtime that lists a device; the others end as they may."""
    if runtime != "working":
        raise IsolatedError("it ended")
    return work(runtime)


def printed() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "devices"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def in_terminal(columns: int) -> str:
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, "devices"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert child.wait(timeout=60) == 0
    return b"".join(parts).decode()


def test_an_address_is_host_and_port() -> None:
    assert Endpoint.parse("192.168.0.2:50052") == Endpoint("192.168.0.2", 50052)
    assert Endpoint.parse("my-host.local:1") == Endpoint("my-host.local", 1)


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


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu", "gpu_layers": 0},
        {"device": "cuda,cpu", "gpu_layers": 10},
        {"gpu_layers": 10},
        {"device": "rpc0", "rpc": ("a:1", "b:1"), "gpu_layers": 10},
    ],
)
def test_options_that_agree_are_taken(options: Any) -> None:
    given = LoadOptions(**options).runtime_options
    assert given.rpc_servers == options.get("rpc", ())


def test_a_draft_stays_on_this_machine() -> None:
    options = LoadOptions(rpc=("a:1",), draft="small")
    assert options.draft_runtime_options.rpc_servers == ()
    assert options.drafts_elsewhere


@pytest.mark.parametrize("name", ["ort", "reference"])
def test_servers_are_refused_by_runtimes_without_them(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no option rpc"):
        runtimes.load_runtime(name).open(None, RuntimeOptions(rpc_servers=("a:1",)))
