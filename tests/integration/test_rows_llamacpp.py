"""Kernels of our own inside llama.cpp: what they compute there, and what becomes of a build, a file
or a machine that they do not fit. See test_llamacpp_invariant_rows.py for sessions and trees."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.llamacpp import LlamaCppModel, upstream
from edge_spec.runtimes.llamacpp.rows import findings, install, library, self_test

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


def test_prompts_have_the_same_bits_however_they_are_divided(
    gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    text = tokens(110)
    model = open_llama("llamacpp", gguf("llama", "Q8_0"), threads=2)
    found = []
    for parts in ([110], [1, 109], [64, 46], [8, 9, 93]):
        session, at = model.open_session(), 0
        for part in parts:
            session.prefill(text[at : at + part])
            at += part
        found.append(session.forward(TokenTree.chain(7, [8])).logits.copy())
        session.close()
    model.close()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_a_model_is_left_to_llama_cpp_where_that_is_asked_for(
    gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    """Both at once, in turns: each computes with its own kernels, and they hardly differ."""
    path, text = gguf("llama", "Q8_0"), tokens(40)
    ours = open_llama("llamacpp", path)
    with install.stock_weights():
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


def test_matrices_of_a_type_without_kernels_are_left_to_llama_cpp(
    gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    model = open_llama("llamacpp", gguf("llama", "F32"))
    assert model.capabilities.kernels == "rows: off, there are no kernels for its types"
    assert not model.capabilities.invariant_rows
    assert np.isfinite(scored(model, tokens(40), [4] * 5)).all()
    model.close()


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
upstream.library()
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


def test_a_process_that_was_forked_after_a_load_computes_the_same(gguf: Files) -> None:
    code = """
import os, sys
from pathlib import Path
from edge_spec.core.model import RuntimeOptions
from edge_spec.models import runtimes
from edge_spec.core.tree import TokenTree
source = runtimes.open_model_info(Path(sys.argv[1]))
model = runtimes.load_runtime("llamacpp").open(source, RuntimeOptions(threads=1))
def score():
    session = model.open_session()
    session.prefill([1, 2, 3])
    return session.forward(TokenTree.chain(4, [5, 6])).logits.tobytes()
readable, writable = os.pipe()
if os.fork() == 0:
    os.write(writable, score()[:4096])
    os._exit(0)
found = os.read(readable, 4096)
assert os.wait()[1] == 0
assert found == score()[:4096] and len(found) > 1000
"""
    child = in_child(code, str(gguf("llama", "Q8_0")))
    assert child.returncode == 0, child.stderr


def test_another_ggml_in_the_process_is_none_of_ours(
    gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    """That of ik_llama.cpp, whose functions have the same names."""
    pytest.importorskip("ik_llama_cpp")
    from ik_llama_cpp import _ctypes_api

    other: Any = _ctypes_api
    path, text = gguf("llama", "Q8_0"), tokens(40)
    model = open_llama("llamacpp", path)
    before = scored(model, text, [4] * 5)
    params = other.llama_model_default_params()
    params.n_gpu_layers = 0
    loaded = other.llama_model_load_from_file(str(path).encode(), params)
    assert loaded
    np.testing.assert_array_equal(scored(model, text, [4] * 5), before)
    other.llama_free_model(loaded)
    again = open_llama("llamacpp", path)  # its weights are packed by the same functions
    assert again.capabilities.invariant_rows
    np.testing.assert_array_equal(scored(again, text, [4] * 5), before)
    again.close(), model.close()


@pytest.fixture
def broken(ggml: Any, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """broken(version): a build of ggml whose CPU backend says that it has this version of the API,
    all else as it is."""
    registry = ggml.ggml_backend_cpu_reg
    registry.restype = ctypes.c_void_p
    address = registry()
    files = library.ggml_libraries(ggml)
    with Path("/proc/self/maps").open() as maps:
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
def test_a_build_of_another_version_stays_as_it_is(
    broken: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    reason = findings.fault(KEY, broken(7))
    assert reason == "its test failed: ggml has version 7 of its API, known are 2 to 3"


@pytest.mark.skipif(sys.platform != "linux", reason="reads where a library is mapped")
def test_a_build_with_other_structures_crashes_no_process_of_a_user(
    broken: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that its buffer types are as in version 3, while they are as in version 2."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    path = broken(3)
    reason = findings.fault(KEY, path)
    assert reason is not None and "the library ended the process (SIGSEGV)" in reason
    path.unlink()  # what was found is remembered, and nothing is tried again
    assert findings.fault(KEY, path) == reason


def test_a_library_without_the_functions_is_named_by_the_first_that_is_missing() -> None:
    code = """
import ctypes, math
from edge_spec.runtimes.llamacpp.rows import library
import _ctypes
other = ctypes.CDLL(_ctypes.__file__)
print(library.function("install")(other._handle, 1023, 1).decode())
"""
    child = in_child(code)
    assert child.stdout.strip() == "this build of ggml does not export ggml_tensor_overhead"


def test_a_test_that_does_not_end_is_tried_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    outcomes: list[IsolatedError] = [NoAnswerError("busy"), IsolatedError("wrong")]

    def tried(*_: Any, **__: Any) -> None:
        raise outcomes.pop(0)

    monkeypatch.setattr(findings, "isolated", tried)
    assert findings.fault(KEY, Path("ggml")) == "its test did not end: busy"
    assert findings.fault(KEY, Path("ggml")) == "its test failed: wrong"
    assert findings.fault(KEY, Path("ggml")) == "its test failed: wrong"  # remembered


def test_the_variable_leaves_llama_cpp_as_it_is(ggml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(install.VARIABLE, "off")
    assert install.install(ggml).description == "rows: off, EDGE_SPEC_ROWS=off"


class TestPieces:
    """A weight that ggml is given in pieces, which llama.cpp never does."""

    @pytest.fixture
    def test(self, ggml: Any) -> Iterator[Any]:
        with self_test._Test(ggml).opened() as test:
            yield test

    @pytest.fixture
    def product(self, test: Any) -> Callable[..., list[float]]:
        values = test._numbers(512 * 40)
        given = test._numbers(512)
        stored = test._stored(library.TYPES["Q8_0"], values, 512)
        size = ctypes.sizeof(stored)

        def product(*ends: int) -> list[float]:
            """Written in pieces that begin and end there, by thousandths of the whole."""
            context = test._context()
            weight = test._tensor(context, library.TYPES["Q8_0"], 512, 40)
            test._allocate(context, test._ours)
            for first, last in pairwise(ends):
                at, end = first * size // 1000, last * size // 1000
                address = ctypes.addressof(stored) + at
                test._ggml.ggml_backend_tensor_set(weight, address, at, end - at)
            inner = test._context()
            x = test._tensor(inner, 0, 512, 1)
            out = test._ggml.ggml_mul_mat(inner, weight, x)
            return list(test._computed(inner, out, {x: array("f", given)}, 2))

        return product

    def test_it_is_packed_once_it_is_whole(self, product: Callable[..., list[float]]) -> None:
        whole = product(0, 1000)
        assert product(0, 300, 301, 1000) == whole
        assert all(map(math.isfinite, whole))

    @pytest.mark.parametrize("ends", [(), (0, 999), (1, 1000)])
    def test_half_of_it_gives_no_numbers(
        self, ends: tuple[int, ...], product: Callable[..., list[float]]
    ) -> None:
        assert all(map(math.isnan, product(*ends)))
