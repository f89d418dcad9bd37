"""The operations that this exporter writes, in numpy.

Names, arguments and defaults are those of MIL, coremltools' intermediate language, up to iOS 18.
Numbers come and go as float32, int32 or bool arrays; the interpreter rounds where a program says
float16, so an operation is computed as accelerators with float32 accumulators do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_CASTS: Mapping[str, Any] = {"fp16": np.float32, "fp32": np.float32, "int32": np.int32}


def linear(x: np.ndarray, weight: np.ndarray, bias: Any = None) -> np.ndarray:
    """x: [.., in]; weight: [out, in] -> [.., out]."""
    product: np.ndarray = x @ weight.T
    return product if bias is None else product + bias


def matmul(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False) -> Any:
    return (x.swapaxes(-1, -2) if transpose_x else x) @ (y.swapaxes(-1, -2) if transpose_y else y)


def conv(
    x: np.ndarray,
    weight: np.ndarray,
    bias: Any = None,
    strides: Sequence[int] = (1, 1),
    pad_type: str = "valid",
    pad: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
) -> np.ndarray:
    """x: [batch, in, height, width]; weight: [out, in, 1, 1]. Raises ValueError for other kernels
    than 1 x 1, whose padding type and dilation do not matter."""
    if weight.shape[2:] != (1, 1) or groups != 1 or np.any(np.not_equal(strides, 1)):
        raise ValueError(f"a kernel of {weight.shape}, {groups} groups, strides {list(strides)}")
    if pad_type == "custom" and np.any(pad):
        raise ValueError(f"padding by {list(pad)}")
    batch, channels, height, width = x.shape
    flat = weight[:, :, 0, 0] @ x.reshape(batch, channels, height * width)
    product: np.ndarray = flat.reshape(batch, len(weight), height, width)
    return product if bias is None else product + np.reshape(bias, (-1, 1, 1))


def scaled_dot_product_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, attn_mask: Any
) -> np.ndarray:
    """query: [.., rows, size]; key, value: [.., slots, size]; the mask is added."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= np.float32(1 / np.sqrt(query.shape[-1]))
    attended: np.ndarray = softmax(scores + attn_mask) @ value
    return attended


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers: np.ndarray = np.exp(x - x.max(axis=axis, keepdims=True))
    powers /= powers.sum(axis=axis, keepdims=True)
    return powers


def layer_norm(x: np.ndarray, axes: Sequence[int], epsilon: float = 1e-5) -> np.ndarray:
    """(x - mean) / sqrt(variance + epsilon) over `axes`."""
    over = _numbers(axes)
    centred = x - x.mean(axis=over, keepdims=True)
    variance = np.mean(centred * centred, axis=over, keepdims=True)
    normed: np.ndarray = centred / np.sqrt(variance + np.float32(epsilon))
    return normed


def silu(x: np.ndarray) -> Any:
    return x / (1 + np.exp(-np.clip(x, -80, None)))  # clipped, so that exp is within float32


def rsqrt(x: np.ndarray, epsilon: float = 1e-12) -> Any:
    return 1 / np.sqrt(x + np.float32(epsilon))


def reduce_mean(x: np.ndarray, axes: Any, keep_dims: bool = False) -> Any:
    return np.mean(x, axis=_numbers(axes), keepdims=bool(keep_dims))


def gather(
    x: Any, indices: Any, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Any:
    """Raises ValueError for batch_dims, IndexError for indices that are not there."""
    if batch_dims:
        raise ValueError(f"batch_dims of {batch_dims}")
    return np.take(x, indices, axis=int(axis))


def concat(values: Sequence[Any], axis: int, interleave: bool = False) -> Any:
    if interleave:
        raise ValueError("interleaved values")
    return np.concatenate(values, axis=int(axis))


def slice_by_index(x: np.ndarray, begin: Any, end: Any) -> np.ndarray:
    """Returns a copy: a state may be written before it is used."""
    return x[_part(begin, end)].copy()


def update_slice(x: np.ndarray, update: np.ndarray, begin: Any, end: Any) -> None:
    """Writes `update` into a slice of x; raises ValueError where the shapes differ."""
    part = x[_part(begin, end)]
    if part.shape != update.shape:
        raise ValueError(f"a slice of {part.shape} cannot take {update.shape}")
    part[...] = update


def _part(begin: Any, end: Any) -> tuple[slice, ...]:
    return tuple(map(slice, _numbers(begin), _numbers(end)))


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(np.ravel(values).tolist())


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "cast": lambda x, dtype: np.asarray(x).astype(_CASTS[dtype]),
    "concat": concat,
    "conv": conv,
    "equal": lambda x, y: x == y,
    "expand_dims": lambda x, axes: np.expand_dims(x, _numbers(axes)),
    "gather": gather,
    "layer_norm": layer_norm,
    "linear": linear,
    "matmul": matmul,
    "maximum": lambda x, y: np.maximum(x, y),
    "minimum": lambda x, y: np.minimum(x, y),
    "mul": lambda x, y: x * y,
    "reduce_mean": reduce_mean,
    "reshape": lambda x, shape: x.reshape(_numbers(shape)),
    "rsqrt": rsqrt,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "silu": silu,
    "slice_by_index": slice_by_index,
    "softmax": softmax,
    "split": lambda x, num_splits, axis: np.split(x, int(num_splits), axis=int(axis)),
    "squeeze": lambda x, axes: np.squeeze(x, _numbers(axes)),
    "sub": lambda x, y: x - y,
    "tile": lambda x, reps: np.tile(x, _numbers(reps)),
    "transpose": lambda x, perm: x.transpose(_numbers(perm)),
}
# Operations that compute no new numbers: their results need no rounding.
EXACT = frozenset(
    [
        "concat",
        "equal",
        "expand_dims",
        "gather",
        "reshape",
        "slice_by_index",
        "split",
        "squeeze",
        "tile",
        "transpose",
    ]
)
