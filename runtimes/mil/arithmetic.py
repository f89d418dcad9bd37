"""Operations of Core ML programs that compute new numbers, in numpy.

Names, arguments and defaults are those of MIL, coremltools' intermediate language, up to iOS 18.
Numbers come and go as float32, int32 or bool arrays; the interpreter rounds where a program says
float16, so an operation is computed as accelerators with float32 accumulators do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

_CASTS: Mapping[str, Any] = MappingProxyType(
    {"bool": np.bool_, "fp16": np.float32, "fp32": np.float32}
    | {name: np.int32 for name in ("int8", "uint8", "int16", "uint16", "int32")}
)


def add(x: Any, y: Any) -> Any:
    return x + y


def sub(x: Any, y: Any) -> Any:
    return x - y


def mul(x: Any, y: Any) -> Any:
    return x * y


def real_div(x: Any, y: Any) -> Any:
    return x / y


def square(x: Any) -> Any:
    return x * x


def maximum(x: Any, y: Any) -> Any:
    return np.maximum(x, y)


def minimum(x: Any, y: Any) -> Any:
    return np.minimum(x, y)


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
    query: np.ndarray, key: np.ndarray, value: np.ndarray, attn_mask: Any = None
) -> np.ndarray:
    """query: [.., rows, size]; key, value: [.., slots, size]; mask: added, or bool: True sees."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= np.float32(1 / np.sqrt(query.shape[-1]))
    if attn_mask is not None:
        if attn_mask.dtype == np.bool_:
            scores = np.where(attn_mask, scores, -np.inf)
        else:
            scores += attn_mask
    attended: np.ndarray = softmax(scores) @ value
    return attended


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers: np.ndarray = np.exp(x - x.max(axis=axis, keepdims=True))
    powers /= powers.sum(axis=axis, keepdims=True)
    return powers


def layer_norm(
    x: np.ndarray,
    axes: Sequence[int] | None = None,
    gamma: Any = None,
    beta: Any = None,
    epsilon: float = 1e-5,
) -> np.ndarray:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta over `axes`, which gamma spans."""
    over = tuple(range(x.ndim)) if axes is None else tuple(int(axis) % x.ndim for axis in axes)
    shape = [size if axis in over else 1 for axis, size in enumerate(x.shape)]
    centred = x - x.mean(axis=over, keepdims=True)
    variance = np.mean(centred * centred, axis=over, keepdims=True)
    normed: np.ndarray = centred / np.sqrt(variance + np.float32(epsilon))
    if gamma is not None:
        normed = normed * np.reshape(gamma, shape)
    return normed if beta is None else normed + np.reshape(beta, shape)


def sigmoid(x: np.ndarray) -> np.ndarray:
    # The clip keeps exp within float32.
    result: np.ndarray = 1 / (1 + np.exp(-np.clip(x, -80, None)))
    return result


def silu(x: np.ndarray) -> Any:
    return x * sigmoid(x)


def rsqrt(x: np.ndarray, epsilon: float = 1e-12) -> Any:
    return 1 / np.sqrt(x + np.float32(epsilon))


def reduce_mean(x: np.ndarray, axes: Any = None, keep_dims: bool = False) -> Any:
    return np.mean(x, axis=_axes(axes), keepdims=bool(keep_dims))


def reduce_sum(x: np.ndarray, axes: Any = None, keep_dims: bool = False) -> Any:
    return np.sum(x, axis=_axes(axes), keepdims=bool(keep_dims))


def cast(x: Any, dtype: str) -> Any:
    return np.asarray(x).astype(_CASTS[dtype])


def _axes(axes: Any) -> tuple[int, ...] | None:
    return None if axes is None else tuple(np.ravel(axes).tolist())


ARITHMETIC: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": add,
        "cast": cast,
        "conv": conv,
        "layer_norm": layer_norm,
        "linear": linear,
        "matmul": matmul,
        "maximum": maximum,
        "minimum": minimum,
        "mul": mul,
        "real_div": real_div,
        "reduce_mean": reduce_mean,
        "reduce_sum": reduce_sum,
        "rsqrt": rsqrt,
        "scaled_dot_product_attention": scaled_dot_product_attention,
        "sigmoid": sigmoid,
        "silu": silu,
        "softmax": softmax,
        "square": square,
        "sub": sub,
    }
)
