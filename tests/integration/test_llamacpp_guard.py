"""Faults inside llama.cpp that end a process elsewhere: real aborts and real C++ exceptions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

PREPARED = """
import ctypes, sys
from functools import partial
from pathlib import Path
from llama_cpp._ggml import libggml
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp.guard import DeviceGuard
from edge_spec.runtimes.llamacpp.upstream import library

def abort(context, batch):
    libggml.ggml_abort(b"/backend.cpp", 7, b"out of %s", b"luck")

def throw(context, batch):
    ctypes.CDLL("libstdc++.so.6")._ZSt20__throw_length_errorPKc(b"too long")

def guarded(decode):
    return DeviceGuard(library().replacing(llama_decode=decode)).guarded()
"""
LOST = """
source = runtimes.open_model_info(Path(sys.argv[2]))
options = RuntimeOptions(threads=1, providers=("cpu",))
on_cpu = runtimes.load_runtime("llamacpp").open(source, options).open_session()
before = on_cpu.forward(TokenTree.chain(1)).logits.copy()
lost = guarded(globals()[sys.argv[1]])
decode = partial(lost.run, lost.llama_decode)
for call in (decode, decode, lost.open_context):
    try:
        call(0, None)
    except DeviceError as error:
        print(error)
lost.llama_free(1)  # no context: it would crash
assert (on_cpu.forward(TokenTree.chain(1)).logits == before).all()
print("survived")
"""
ELSEWHERE = """
guarded(abort)
abort(0, None)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREPARED + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="its C++ tells each thread alone of exceptions")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("abort", "out of luck"),
        pytest.param(
            "throw",
            "its backend threw an exception",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="calls libstdc++"),
        ),
    ],
)
def test_a_fault_on_a_device_is_an_error_and_all_else_goes_on(
    fault: str, reason: str, gguf: Callable[..., Path]
) -> None:
    done = run(LOST, fault, str(gguf()))
    assert (done.returncode, done.stderr) == (0, "")
    *told, last = done.stdout.splitlines()
    assert last == "survived" and len(told) == 3
    assert all(line.startswith(f"llama.cpp has lost a device: {reason}. ") for line in told)


def test_a_fault_that_nobody_waits_for_ends_the_process_with_one_line() -> None:
    done = run(ELSEWHERE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("edge-spec: llama.cpp cannot go on: out of luck. ")
    assert done.stderr.count("\n") == 1
