"""llama.cpp's devices as they are listed, and servers that cannot be used."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import DeviceError, UsageError
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.llamacpp.devices import choose_devices, listed, remote_devices
from edge_spec.runtimes.llamacpp.library import Library, LibraryDevice
from edge_spec.runtimes.llamacpp.rows.install import Rows

Files = Callable[..., Path]
OpenLlama = Callable[..., LlamaCppModel]

GIB = 2**30
CPU = LibraryDevice("CPU", "a processor", True, 8 * GIB, 16 * GIB)
BLAS = LibraryDevice("BLAS", "a library", True, 8 * GIB, 16 * GIB)
CUDA0 = LibraryDevice("CUDA0", "a card", False, 20 * GIB, 24 * GIB, 1)
RPC0 = LibraryDevice("RPC0", "a:1", False, 5 * GIB, 6 * GIB, 2, "a:1")
RPC1 = LibraryDevice("RPC1", "b:1", False, 0, 0, 3, "b:1")


@pytest.fixture
def library(llama: str) -> Library:
    found: Library = runtimes.load_runtime(llama)._library()  # type: ignore[attr-defined]
    return found


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


def test_the_kind_and_memory_of_each_device_are_listed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [RPC0, RPC1, CPU, BLAS, CUDA0]
    pretended = replace(library, devices=lambda *servers: there, takes_servers=True)
    monkeypatch.setattr("edge_spec.runtimes.llamacpp.devices.fault", lambda server: None)
    found = list(listed("llamacpp", pretended, ["a:1", "b:1"]))
    assert [(device.name, device.kind) for device in found] == [
        ("rpc0", "remote"),
        ("rpc1", "remote"),
        ("cpu", "cpu"),
        ("cuda0", "gpu"),
    ]
    assert (found[0].free_bytes, found[0].total_bytes) == (5 * GIB, 6 * GIB)
    assert (found[1].free_bytes, found[1].total_bytes) == (None, None)
    for device in found:  # what is listed can be chosen
        assert device.name is not None
        choose_devices([device.name], there)


@pytest.mark.parametrize(
    ("features", "info", "is_told"),
    [
        (("X86_V3", "X86_V4"), b"AVX2 = 1 | AVX512 = 0 | ", True),
        (("AVX512F",), b"CPU : AVX2 = 1 | ", True),
        (("X86_V3", "X86_V4"), b"AVX2 = 1 | AVX512 = 1 | ", False),
        (("X86_V3",), b"AVX2 = 1 | AVX512 = 0 | ", False),
        ((), b"NEON = 1 | ", False),
    ],
)
def test_a_build_for_less_than_the_processor_has_is_told(
    features: tuple[str, ...],
    info: bytes,
    is_told: bool,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge_spec.runtimes.llamacpp.devices.cpu_features", lambda: features)
    pretended = replace(
        library, devices=lambda *servers: [CPU, CUDA0], system_info=lambda: info, rows=None
    )
    cpu, cuda = listed("llamacpp", pretended, [])
    assert (cpu.hint is not None) == is_told and cuda.hint is None
    cpu, cuda = listed("llamacpp", replace(pretended, rows=Rows("avx2")), [])
    assert cpu.hint is None  # what takes the time is computed by others
    assert cpu.kernels == "rows: avx2" and cuda.kernels is None
    assert b"AVX2 = " in library.system_info() or b"NEON = " in library.system_info()


def test_a_server_that_does_not_serve_is_listed_with_the_reason(
    library: Library, closed_port: int
) -> None:
    """Nothing but its connection is tried: the library would end the process."""
    server = f"127.0.0.1:{closed_port}"
    asked: list[Any] = []

    def devices(*servers: str) -> list[LibraryDevice]:
        asked.extend(servers)
        return [CPU]

    pretended = replace(library, devices=devices, takes_servers=True)
    found = list(listed("llamacpp", pretended, [server]))
    assert [device.name for device in found] == ["cpu", server]
    assert "no connection: " in (found[1].fault or "")
    assert not asked
    with pytest.raises(DeviceError, match=f"RPC server {server} cannot be used: no connection"):
        remote_devices(pretended, [server])


def test_a_library_without_servers_says_how_to_compile_one_with(
    library: Library, gguf: Files, llama: str, open_llama: OpenLlama
) -> None:
    if library.takes_servers:
        pytest.skip("this llama-cpp-python was compiled with RPC")
    with pytest.raises(UsageError, match="compiled without RPC") as caught:
        open_llama(llama, gguf(), rpc_servers=("127.0.0.1:1",))
    assert "CMAKE_ARGS=-DGGML_RPC=ON pip install" in caught.value.remedy
    found = list(listed(llama, library, ["127.0.0.1:1"]))
    assert "compiled without RPC" in (found[-1].fault or "")


def test_a_server_that_no_chosen_device_belongs_to_is_refused(
    gguf: Files, open_llama: OpenLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(
        "edge_spec.runtimes.llamacpp.model.remote_devices", lambda library, servers: [RPC0, RPC1]
    )
    with pytest.raises(UsageError, match="--device rpc1 leaves nothing for --rpc a:1"):
        open_llama("llamacpp", gguf(), providers=("rpc1",), rpc_servers=("a:1", "b:1"))


def test_functions_are_bound_once() -> None:
    """Threads open sessions at the same time: what one calls, another one must not bind again."""
    library = pytest.importorskip("llama_cpp._ggml").libggml
    opened: Library = runtimes.load_runtime("llamacpp")._library()  # type: ignore[attr-defined]
    before = library.ggml_backend_dev_memory.argtypes
    assert before
    opened.devices()
    assert library.ggml_backend_dev_memory.argtypes is before
