"""Attention of our own inside llama.cpp, with all that models ask of it: windows, caps, sinks and
quantized caches. Bits of a row are the same in every pass, and its logits those of llama.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.llamacpp import LlamaCppModel, upstream
from fixtures import family_gguf
from fixtures.rows import stock_weights

OpenLlama = Callable[..., LlamaCppModel]
Tokens = Callable[..., list[int]]
READ_BEFORE = 20  # more than the windows of these models, which are of 8 tokens
SCORED = 40
WIDTHS = ([1] * SCORED, [2, 3, 5, 8, 16, 6], [16, 16, 8], [40])


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """halves(family): the family's tiny model, in float16, which our kernels take."""
    llama_cpp = pytest.importorskip("llama_cpp")
    rows = upstream.library().rows
    assert rows is not None
    if not rows.takes_attention:
        pytest.skip(f"{rows.description}: there is nothing to test")
    directory = tmp_path_factory.mktemp("halves")

    @functools.cache
    def write(family: str) -> Path:
        whole = family_gguf.write_gguf(family, directory / f"{family}-f32.gguf")
        path = directory / f"{family}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.nthread = 1, 1
        arguments = str(whole).encode(), str(path).encode(), ctypes.byref(options)
        assert llama_cpp.llama_model_quantize(*arguments) == 0
        return path

    return write


def scored(model: LlamaCppModel, text: list[int], widths: list[int]) -> np.ndarray:
    """Returns the logits of all tokens but the first ones, in passes of these widths."""
    session, at, found = model.open_session(), READ_BEFORE, []
    session.prefill(text[:at])
    for width in widths:
        found.append(session.forward(TokenTree.chain(text[at], text[at + 1 : at + width])).logits)
        found[-1] = found[-1].copy()
        session.commit(range(width))
        at += width
    session.close()
    return np.concatenate(found)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """The root of the mean square of differences, for logits whose own is 1."""
    return float(np.sqrt(np.mean((first - second) ** 2) / second.var()))


@pytest.mark.parametrize(
    ("family", "kv_type"),
    [
        ("gemma2", "f16"),
        ("gemma3", "f16"),
        ("gpt-oss-floats", "f16"),
        ("gpt-oss-floats", "f16-bf16"),
        ("gemma2", "q8_0"),
        ("gemma3", "q4_0"),
    ],
)
def test_a_row_is_the_same_in_every_pass_and_close_to_llama_cpps(
    family: str, kv_type: str, halves: Callable[[str], Path], open_llama: OpenLlama, tokens: Tokens
) -> None:
    def opened(threads: int, kind: str) -> LlamaCppModel:
        options = {"flash_attention": True, "context_length": 128, "kv_type": kind}
        return open_llama("llamacpp", halves(family), threads=threads, **options)

    def stock(kind: str) -> np.ndarray:
        with stock_weights():
            model = opened(1, kind)
        result = scored(model, text, WIDTHS[0])
        model.close()
        return result

    text, found = tokens(READ_BEFORE + SCORED), []
    for threads in (1, 3):
        model = opened(threads, kv_type)
        found += [scored(model, text, widths) for widths in WIDTHS]
        is_invariant = model.capabilities.invariant_rows
        model.close()
    assert is_invariant
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    # llama.cpp rounds queries, and sums of values, to float16 and sometimes to 8 bits: less than
    # what a cache of a narrower type costs. Wrong windows, caps or sinks would cost much more.
    plain = stock("f16")
    if kv_type.startswith("f16"):
        assert 0 < distance(found[0], plain) < 0.01
    else:
        assert 0 < distance(found[0], plain) < 1.25 * distance(stock(kv_type), plain)
