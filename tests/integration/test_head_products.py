"""What multiplies with a head's matrices: how near it is to float32, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.heads import ComputesHeads, HeadMatrix
from edge_spec.drafters.heads.float_products import FloatProducts, NumpyBackend
from edge_spec.drafters.heads.layers import Heads, attend
from edge_spec.errors import ModelFileError
from edge_spec.loader import head_products
from edge_spec.loader.head_products import StoredBackend, head_backend
from edge_spec.models import runtimes
from edge_spec.runtimes.ort.runtime import OrtRuntime
from edge_spec.storage.atomic import CACHE_VARIABLE

OUT, IN = 96, 64


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "heads"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def matrices() -> dict[str, HeadMatrix]:
    random = np.random.default_rng(0)
    parts = [random.standard_normal((OUT // 2, IN), np.float32) for _ in range(2)]
    bias = random.standard_normal(OUT).astype(np.float32)
    read = tuple(partial(np.asarray, part) for part in parts)
    return {"qkv": HeadMatrix(read, bias), "head": HeadMatrix(read, is_output=True)}


@pytest.fixture
def inputs() -> Iterator[np.ndarray]:
    yield np.random.default_rng(1).standard_normal((5, IN)).astype(np.float32)


@pytest.mark.parametrize(("width", "bits"), [(64, 8), (4096, 4)])
def test_products_are_as_near_as_their_bits_allow(
    width: int, bits: int, head: Path, matrices: dict[str, HeadMatrix], inputs: np.ndarray
) -> None:
    """A weight is off by at most half of a step, 2^-bits of twice the largest of its block, some 3
    standard deviations; IN of them, and inputs of 8 bits, add up as their root does."""
    exact = FloatProducts(matrices)
    rounded = head_backend(head, "target", width).products(matrices)
    for name, own_bits in (("qkv", bits), ("head", 8)):
        off = np.abs(rounded(name, inputs) - exact(name, inputs))
        bound = 6 / 2**own_bits + 6 / 2**8  # of a weight's and of an input's steps
        assert off.max() < bound * np.sqrt(IN)
        assert off.max() > 0  # it was rounded
    assert rounded("qkv", inputs[:1]).shape == (1, OUT)


def test_an_output_matrix_keeps_8_bits(
    matrices: dict[str, HeadMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    four, eight = (runtimes.product_graph(matrices["head"], bits) for bits in (4, 8))
    assert len(eight) > len(four)
    made: dict[str, bytes] = {}
    monkeypatch.setattr(OrtRuntime, "open_products", lambda _, stored, threads: made.update(stored))
    StoredBackend(OrtRuntime(), 4).products(matrices)
    assert made["head"] == eight and made["qkv"] != eight


def test_what_was_made_once_is_read_from_the_cache(
    cache: Path,
    head: Path,
    matrices: dict[str, HeadMatrix],
    inputs: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = head_backend(head, "target", 64).products(matrices)("qkv", inputs)

    def fail(matrix: HeadMatrix, bits: int) -> bytes:
        raise AssertionError("made again")

    monkeypatch.setattr(runtimes, "product_graph", fail)
    np.testing.assert_array_equal(
        head_backend(head, "target", 64).products(matrices)("qkv", inputs), first
    )
    with pytest.raises(AssertionError, match="made again"):  # tables of another target
        head_backend(head, "other", 64).products(matrices)
    (head / "config.json").write_text('{"changed": 1}')
    with pytest.raises(AssertionError, match="made again"):
        head_backend(head, "target", 64).products(matrices)
    assert len(list(cache.glob("*.zip"))) == 1


def test_a_damaged_one_is_made_again(
    cache: Path, head: Path, matrices: dict[str, HeadMatrix], inputs: np.ndarray
) -> None:
    first = head_backend(head, "target", 64).products(matrices)("qkv", inputs)
    (file,) = cache.glob("*.zip")
    whole = file.read_bytes()
    for damaged in (whole[:100], b"", whole[:2000] + b"\x55" * 64 + whole[2064:]):
        file.write_bytes(damaged)
        again = head_backend(head, "target", 64).products(matrices)("qkv", inputs)
        np.testing.assert_array_equal(again, first)
        assert file.read_bytes() == whole or len(file.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written_costs_only_time(
    cache: Path,
    head: Path,
    matrices: dict[str, HeadMatrix],
    inputs: np.ndarray,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.parent.mkdir()
    cache.write_text("no directory")
    head_backend(head, "target", 64).products(matrices)("qkv", inputs)
    assert "not kept" in caplog.text


def test_numpy_computes_where_onnxruntime_is_missing(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_products, "find_spec", lambda name: None)
    assert isinstance(head_backend(head, "target", 64), NumpyBackend)


def test_what_is_no_graph_is_refused_in_one_line() -> None:
    runtime = runtimes.load_runtime("ort")
    assert isinstance(runtime, ComputesHeads)
    with pytest.raises(ModelFileError, match="cannot load the matrix fc") as caught:
        runtime.open_products({"fc": b"nothing"}, None)
    assert caught.value.remedy == "Update onnxruntime."


def test_a_mask_of_all_is_no_mask() -> None:
    random = np.random.default_rng(0)
    queries, keys, values = (
        random.standard_normal((heads, rows, 16)).astype(np.float32)
        for heads, rows in ((4, 3), (2, 700), (2, 700))
    )
    heads_ = Heads(queries, keys, values)
    np.testing.assert_array_equal(attend(heads_, None), attend(heads_, np.ones((3, 700), bool)))
