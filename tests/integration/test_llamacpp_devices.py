"""Servers of llama.cpp that cannot be used."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import DeviceError, UsageError
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.llamacpp.devices import listed, remote_devices
from edge_spec.runtimes.llamacpp.library import Library, LibraryDevice

Files = Callable[..., Path]
OpenLlama = Callable[..., LlamaCppModel]

GIB = 2**30
CPU = LibraryDevice("CPU", "a processor", True, 8 * GIB, 16 * GIB)
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


def test_a_server_that_does_not_serve_is_listed_with_the_reason(
    library: Library, closed_port: int
) -> None:
    """Nothing but its connection is tried: the library would end the process."""
    server = f"127.0.0.1:{closed_port}"
    asked: list[Any] = []

    def devices(*servers: str) -> list[LibraryDevice]:
        asked.extend(servers)
        return [CPU]

    pretended = library.replacing(devices=devices, llama_supports_rpc=lambda: True)
    found = list(listed("llamacpp", pretended, [server]))
    assert [device.name for device in found] == ["cpu", server]
    assert "no connection: " in (found[1].fault or "")
    assert not asked
    with pytest.raises(DeviceError, match=f"RPC server {server} cannot be used: no connection"):
        remote_devices(pretended, [server])


def test_a_server_that_no_chosen_device_belongs_to_is_refused(
    gguf: Files, open_llama: OpenLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(
        "edge_spec.runtimes.llamacpp.model.remote_devices", lambda library, servers: [RPC0, RPC1]
    )
    with pytest.raises(UsageError, match="--device rpc1 leaves nothing for --rpc a:1"):
        open_llama("llamacpp", gguf(), providers=("rpc1",), rpc_servers=("a:1", "b:1"))
