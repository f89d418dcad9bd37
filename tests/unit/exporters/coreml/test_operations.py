"""What the numpy interpreter computes, operation for operation, beside coremltools' folding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

import coremltools as ct
from coremltools.converters.mil import Builder, Function

from fixtures.mil_in_numpy import CONSTEXPR, OPERATIONS, rounded, update_slice

# float32 sums in another order differ by 1e-6 of results of the size of 1 to 10.
TOLERANCE = 1e-5


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + np.float32(0.5)


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


X, Y = normal(2, 3, 4), normal(2, 3, 4, seed=1)
HEADS = {
    "query": normal(1, 2, 3, 8),
    "key": normal(1, 2, 5, 8, seed=1),
    "value": normal(1, 2, 5, 8, seed=2),
}
SLICE = {"begin": whole(0, 1, 0), "end": whole(2, 3, 4)}
FOLDED: list[tuple[str, dict[str, Any]]] = [
    ("add", {"x": X, "y": Y}),
    ("add", {"x": whole(3, 4), "y": whole(5, 6)}),
    ("sub", {"x": X, "y": Y[:, :1]}),
    ("mul", {"x": X, "y": Y}),
    ("maximum", {"x": X, "y": Y}),
    ("minimum", {"x": X, "y": Y}),
    ("rsqrt", {"x": positive(2, 3), "epsilon": np.float32(1e-5)}),
    ("linear", {"x": X, "weight": normal(5, 4), "bias": normal(5)}),
    ("linear", {"x": X, "weight": normal(5, 4)}),
    ("matmul", {"x": X, "y": normal(2, 4, 5)}),
    ("matmul", {"x": X, "y": normal(2, 5, 4), "transpose_y": True}),
    ("matmul", {"x": normal(2, 4, 3), "y": normal(2, 4, 5), "transpose_x": True}),
    ("softmax", {"x": X * 20}),
    ("softmax", {"x": X, "axis": 1}),
    ("reduce_mean", {"x": X, "axes": whole(-1), "keep_dims": True}),
    ("reduce_mean", {"x": X, "axes": whole(0, 2)}),
    ("layer_norm", {"x": X, "axes": [2]}),
    ("layer_norm", {"x": X, "axes": [1, 2], "epsilon": np.float32(0.1)}),
    ("scaled_dot_product_attention", HEADS | {"attn_mask": normal(1, 1, 3, 5) * 10}),
    ("cast", {"x": X * 10, "dtype": "int32"}),
    ("cast", {"x": whole(1, -2), "dtype": "fp32"}),
    ("gather", {"x": X, "indices": whole(1, 0, 1), "axis": 0}),
    ("gather", {"x": X, "indices": whole(2, 0).reshape(2, 1), "axis": -2}),
    ("concat", {"values": [X, Y], "axis": 1}),
    ("split", {"x": X, "num_splits": 2, "axis": -1}),
    ("slice_by_index", {"x": X, **SLICE}),
    ("slice_by_index", {"x": X, "begin": whole(0, 1, 0), "end": whole(1, 3, -1)}),
    ("reshape", {"x": X, "shape": whole(3, 8)}),
    ("reshape", {"x": X, "shape": whole(6, -1)}),
    ("transpose", {"x": X, "perm": whole(2, 0, 1)}),
    ("expand_dims", {"x": X, "axes": [0, 2]}),
    ("squeeze", {"x": X[:, None], "axes": [1]}),
    ("tile", {"x": X, "reps": whole(1, 2, 1)}),
    ("equal", {"x": whole(1, 2, 3), "y": whole(3, 2, 1)}),
]
# What coremltools does not fold: against formulas below.
BY_FORMULA = {"silu", "conv"}


def fold_constants(kind: str, arguments: dict[str, Any]) -> Any:
    """An operation's result by coremltools, a list where there are several."""
    with Function({}, opset_version=ct.target.iOS18):
        result = getattr(Builder, kind)(**arguments)
    return [var.val for var in result] if isinstance(result, tuple | list) else result.val


@pytest.mark.parametrize(
    ("kind", "arguments"), FOLDED, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(FOLDED)]
)
def test_an_operation_computes_what_coremltools_folds(kind: str, arguments: Any) -> None:
    expected = fold_constants(kind, arguments)
    assert expected is not None
    found = OPERATIONS[kind](**arguments)
    if not isinstance(expected, list):
        found, expected = [found], [expected]
    for part, reference in zip(found, expected, strict=True):
        assert np.shape(part) == np.shape(reference)
        np.testing.assert_allclose(part, reference, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_operation_is_compared() -> None:
    assert {kind for kind, _ in FOLDED} | BY_FORMULA == OPERATIONS.keys()


def test_a_slice_is_written_where_coremltools_writes_it() -> None:
    update = normal(2, 2, 4, seed=1)
    expected = fold_constants("slice_update", {"x": X, "update": update, **SLICE})
    found = X.copy()
    update_slice(found, update, **SLICE)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="cannot take"):
        update_slice(found, update[:1], **SLICE)


def test_silu_is_x_times_its_sigmoid_where_exp_overflows_too() -> None:
    x = np.array([-200, -1, 0, 1, 200], np.float32)
    expected = [-0.0, -1 / (1 + np.e), 0, 1 / (1 + 1 / np.e), 200]
    np.testing.assert_allclose(OPERATIONS["silu"](x), expected, atol=TOLERANCE)


def test_conv_of_1_by_1_is_a_product_for_each_pixel() -> None:
    x, weight, bias = normal(2, 3, 1, 4), normal(5, 3, 1, 1), normal(5)
    found = OPERATIONS["conv"](x, weight, bias)
    assert found.shape == (2, 5, 1, 4)
    for batch in range(2):
        for column in range(4):
            expected = weight[:, :, 0, 0] @ x[batch, :, 0, column] + bias
            np.testing.assert_allclose(found[batch, :, 0, column], expected, atol=TOLERANCE)


@pytest.mark.parametrize("offset", [None, 3])
def test_blocks_have_their_own_scale_and_offset(offset: int | None) -> None:
    data = np.random.RandomState(0).randint(-8, 8, (4, 6)).astype(np.int8)
    scale = positive(2, 3).astype(np.float16)
    offsets = None if offset is None else np.arange(6, dtype=np.int8).reshape(2, 3)
    found = CONSTEXPR["constexpr_blockwise_shift_scale"](data, scale, offsets)
    for i in range(4):
        for j in range(6):
            block = (i // 2, j // 2)
            shift = 0 if offsets is None else int(offsets[block])
            assert found[i, j] == np.float32(scale[block]) * (int(data[i, j]) - shift)


def test_groups_have_their_own_table() -> None:
    indices = np.random.RandomState(0).randint(0, 4, (4, 6)).astype(np.uint8)
    lut = normal(2, 3, 4, 1).astype(np.float16)
    found = CONSTEXPR["constexpr_lut_to_dense"](indices, lut)
    for i in range(4):
        for j in range(6):
            assert found[i, j] == lut[i // 2, j // 2, indices[i, j], 0]


def test_numbers_are_rounded_to_float16_and_beyond_it_infinite() -> None:
    with np.errstate(over="ignore"):
        found = rounded(np.array([1 + 2**-12, 70000, -1e9, 0.1], np.float32))
    assert found.dtype == np.float32
    assert found.tolist() == [1, np.inf, -np.inf, float(np.float16(0.1))]
