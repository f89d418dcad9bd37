"""Kernels of our own inside llama.cpp: what they compute there, and what becomes of a build, a file
or a machine that they do not fit. See test_llamacpp_invariant_rows.py for sessions and trees."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.isolated import isolated
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.llamacpp import LlamaCppModel, upstream
from edge_spec.runtimes.llamacpp.rows import install, library, self_test
from fixtures.rows import stock_weights

KEY = "0" * 64
CHILD_S = 120  # for a process that is done in one second
OpenLlama = Callable[..., LlamaCppModel]
Files = Callable[..., Path]
Tokens = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def rows() -> install.Rows:
    pytest.importorskip("llama_cpp")
    found = upstream.library().rows
    assert found is not None
    if found.table is None:
        pytest.skip(f"{found.description}: there is nothing to test")
    return found


@pytest.fixture
def ggml() -> Any:
    """ggml's library of this process, in which the kernels are in force."""
    from llama_cpp._ggml import libggml

    return libggml


def scored(model: LlamaCppModel, tokens: list[int], widths: list[int]) -> np.ndarray:
    """Returns the logits of all tokens but the first 20, in passes of these widths."""
    session = model.open_session()
    session.prefill(tokens[:20])
    found, at = [], 20
    for width in widths:
        part = tokens[at : at + width]
        found.append(session.forward(TokenTree.chain(part[0], part[1:])).logits.copy())
        session.commit(range(len(part)))
        at += width
    session.close()
    return np.concatenate(found)


def in_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )


def test_every_type_passes_its_test(ggml: Any, rows: install.Rows) -> None:
    found = isolated(self_test.run, ggml._name, timeout_s=CHILD_S)
    assert found == {"types": list(library.TYPES), "attention": rows.takes_attention}


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "F16"])
def test_rows_have_the_same_bits_in_passes_of_any_width_on_any_number_of_threads(
    kind: str, tiny: Any, tmp_path: Path, open_llama: OpenLlama, tokens: Tokens
) -> None:
    """Widths 1 to 16, each in one pass at least."""
    built = tiny.build("llama", max_position_embeddings=256)
    path = tiny.write_gguf(built, tmp_path / "model.gguf", kind)
    text = tokens(20 + 136)
    single = None
    for threads in (1, 2, 3, 4):
        model = open_llama("llamacpp", path, threads=threads)
        assert model.capabilities.invariant_rows
        if single is None:
            single = scored(model, text, [1] * 136)
        splits = [list(range(1, 17)), list(range(16, 0, -1))]
        for widths in splits if threads == 2 else splits[:1]:
            found = scored(model, text, widths)
            np.testing.assert_array_equal(found, single[: len(found)])
        model.close()


def test_a_model_is_left_to_llama_cpp_where_that_is_asked_for(
    gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    """Both at once, in turns: each computes with its own kernels, and they hardly differ."""
    path, text = gguf("llama", "Q8_0"), tokens(40)
    ours = open_llama("llamacpp", path)
    with stock_weights():
        stock = open_llama("llamacpp", path)
    assert ours.capabilities.invariant_rows and not stock.capabilities.invariant_rows
    assert ours.capabilities.kernels != stock.capabilities.kernels == "rows: off, as asked for"
    alone = scored(ours, text, [4] * 5)
    others = scored(stock, text, [4] * 5)
    np.testing.assert_array_equal(scored(ours, text, [1] * 20), alone)
    # Activations are rounded to 8 bits in both, but not in the same way. Other weights would differ
    # by several times as much.
    assert 0 < np.abs(alone - others).max() < 0.25 * others.std()
    ours.close(), stock.close()


def test_a_load_without_memory_for_packed_weights_is_llama_cpps_own(
    tiny: Any, tmp_path: Path
) -> None:
    """The address space has room for the file, and not for as much again."""
    built = tiny.build("llama", hidden_size=512, intermediate_size=8192, vocab_size=265)
    path = tiny.write_gguf(built, tmp_path / "model.gguf", "F16")
    assert path.stat().st_size > 50_000_000  # a context takes less than 45 MB of addresses
    code = """
import resource, sys
from pathlib import Path
from edge_spec.core.model import RuntimeOptions
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import upstream
from edge_spec.core.tree import TokenTree
upstream.library().rows
source = runtimes.open_model_info(Path(sys.argv[1]))
runtime = runtimes.load_runtime("llamacpp")
runtime.require_runnable(source)
size = int(sys.argv[2])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + size + 45_000_000,) * 2)
model = runtime.open(source, RuntimeOptions(threads=1, context_length=64))
print(model.capabilities.kernels, model.capabilities.invariant_rows)
print(model.open_session().forward(TokenTree.chain(1, [2])).logits.shape)
"""
    child = in_child(code, str(path), str(path.stat().st_size), MALLOC_ARENA_MAX="1")
    assert child.returncode == 0, child.stderr
    told, shape = child.stdout.splitlines()[-2:]
    assert told == "rows: off, there was not enough memory for the weights False"
    assert shape == "(2, 265)"


@pytest.fixture
def broken(ggml: Any, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """broken(version): a build of ggml whose CPU backend says that it has this version of the API,
    all else as it is."""
    registry = ggml.ggml_backend_cpu_reg
    registry.restype = ctypes.c_void_p
    address = registry()
    files = library.ggml_libraries(ggml)
    with Path("/proc/self/maps").open(errors="surrogateescape") as maps:  # of any names
        mapped = [line.split() for line in maps if "libggml-cpu" in line]
    offset = None
    for span, _, start, *_ in mapped:
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            offset = address - first + int(start, 16)
    assert offset is not None

    def write(version: int) -> Path:
        for file in files[0].parent.iterdir():
            if "libggml" in file.name:
                (tmp_path / file.name).write_bytes(file.read_bytes())
        path = tmp_path / files[0].name
        raw = bytearray(path.read_bytes())
        assert int.from_bytes(raw[offset : offset + 4], "little") == 2
        raw[offset : offset + 4] = version.to_bytes(4, "little")
        path.write_bytes(raw)
        return tmp_path / Path(ggml._name).name

    yield write


@pytest.mark.skipif(sys.platform != "linux", reason="reads where a library is mapped")
def test_a_build_with_other_structures_crashes_no_process_of_a_user(
    broken: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that its buffer types are as in version 3, while they are as in version 2."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    path = broken(3)
    reason = install.build_fault(KEY, path)
    assert reason is not None and "the library ended the process (SIGSEGV)" in reason
    path.unlink()  # what was found is remembered, and nothing is tried again
    assert install.build_fault(KEY, path) == reason
