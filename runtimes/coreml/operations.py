"""What the operations of Core ML programs compute, in numpy.

Names, arguments and defaults are those of MIL, coremltools' intermediate language, up to iOS 18.
Numbers come and go as float32, int32 or bool arrays; the interpreter rounds where a program says
float16, so an operation is computed as accelerators with float32 accumulators do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

Operation = Callable[..., Any]
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


def equal(x: Any, y: Any) -> Any:
    return x == y


def greater_equal(x: Any, y: Any) -> Any:
    return x >= y


def linear(x: np.ndarray, weight: np.ndarray, bias: Any = 0) -> np.ndarray:
    """x: [.., in]; weight: [out, in] -> [.., out]."""
    product: np.ndarray = x @ weight.T
    return product + bias if np.any(bias) else product


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
    product = weight[:, :, 0, 0] @ x.reshape(batch, channels, height * width)
    product = product.reshape(batch, len(weight), height, width)
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


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def rsqrt(x: np.ndarray, epsilon: float = 1e-12) -> Any:
    return 1 / np.sqrt(x + np.float32(epsilon))


def reduce_mean(x: np.ndarray, axes: Any = None, keep_dims: bool = False) -> Any:
    return np.mean(x, axis=_axes(axes), keepdims=bool(keep_dims))


def reduce_sum(x: np.ndarray, axes: Any = None, keep_dims: bool = False) -> Any:
    return np.sum(x, axis=_axes(axes), keepdims=bool(keep_dims))


def gather(
    x: Any, indices: Any, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Any:
    """Raises ValueError for batch_dims, IndexError for indices that are not there."""
    if batch_dims:
        raise ValueError(f"batch_dims of {batch_dims}")
    return np.take(x, indices, axis=int(axis))


def gather_along_axis(x: Any, indices: Any, axis: int = 0, validate_indices: bool = False) -> Any:
    return np.take_along_axis(x, indices, axis=int(axis))


def concat(values: Sequence[Any], axis: int, interleave: bool = False) -> Any:
    if interleave:
        raise ValueError("interleaved values")
    return np.concatenate(values, axis=int(axis))


def split(x: Any, axis: int, num_splits: Any = None, split_sizes: Any = None) -> list[Any]:
    if split_sizes is None:
        return np.split(x, int(num_splits), axis=int(axis))
    return np.split(x, np.cumsum(split_sizes)[:-1], axis=int(axis))


def slice_by_index(
    x: np.ndarray,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> np.ndarray:
    """A view. A masked begin or end is left out; a squeezed axis is indexed by its begin."""
    return x[_index(x.ndim, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


def slice_by_size(x: np.ndarray, begin: Any, size: Any) -> np.ndarray:
    """A view; a size of -1 reaches to the end."""
    starts, sizes = np.ravel(begin).tolist(), np.ravel(size).tolist()
    ends = [None if n == -1 else start + n for start, n in zip(starts, sizes, strict=True)]
    return x[tuple(map(slice, starts, ends))]


def slice_update(x: np.ndarray, update: np.ndarray, **where: Any) -> np.ndarray:
    """A copy of x with `update` in place of the slice that `slice_by_index` would give."""
    x = x.copy()
    update_slice(x, update, **where)
    return x


def update_slice(x: np.ndarray, update: np.ndarray, **where: Any) -> None:
    """`slice_update` in place; raises ValueError where the shapes differ."""
    part = x[_index(x.ndim, **where)]
    if part.shape != update.shape:
        raise ValueError(f"a slice of {part.shape} cannot take {update.shape}")
    part[...] = update


def reshape(x: np.ndarray, shape: Any) -> np.ndarray:
    """A size of 0 is x's own of that axis."""
    sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(np.ravel(shape).tolist())]
    return x.reshape(sizes)


def transpose(x: np.ndarray, perm: Any) -> np.ndarray:
    return x.transpose(np.ravel(perm).tolist())


def expand_dims(x: Any, axes: Any) -> Any:
    return np.expand_dims(x, _axes(axes) or ())


def squeeze(x: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.squeeze(x, _axes(axes))


def tile(x: Any, reps: Any) -> Any:
    return np.tile(x, np.ravel(reps).tolist())


def cast(x: Any, dtype: str) -> Any:
    return np.asarray(x).astype(_CASTS[dtype])


def select(cond: Any, a: Any, b: Any) -> Any:
    return np.where(cond, a, b)


def identity(x: Any) -> Any:
    return x


def _axes(axes: Any) -> tuple[int, ...] | None:
    return None if axes is None else tuple(np.ravel(axes).tolist())


def _index(
    rank: int,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> tuple[slice | int, ...]:
    begins, ends = np.ravel(begin).tolist(), np.ravel(end).tolist()
    strides = [1] * rank if stride is None else np.ravel(stride).tolist()
    from_start, to_end, squeezed = (
        [False] * rank if mask is None else np.ravel(mask).tolist()
        for mask in (begin_mask, end_mask, squeeze_mask)
    )
    return tuple(
        begins[i]
        if squeezed[i]
        else slice(
            None if from_start[i] else begins[i], None if to_end[i] else ends[i], strides[i]
        )
        for i in range(rank)
    )


# Operations that compute new numbers, whose results are rounded to the program's type.
ARITHMETIC: Mapping[str, Operation] = MappingProxyType(
    {
        "add": add,
        "conv": conv,
        "layer_norm": layer_norm,
        "linear": linear,
        "matmul": matmul,
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
        # Numbers are the same, but their type may not be.
        "cast": cast,
    }
)
# Operations that move numbers that are there.
MOVEMENT: Mapping[str, Operation] = MappingProxyType(
    {
        "concat": concat,
        "equal": equal,
        "expand_dims": expand_dims,
        "gather": gather,
        "gather_along_axis": gather_along_axis,
        "greater_equal": greater_equal,
        "identity": identity,
        "maximum": maximum,
        "minimum": minimum,
        "reshape": reshape,
        "select": select,
        "slice_by_index": slice_by_index,
        "slice_by_size": slice_by_size,
        "slice_update": slice_update,
        "split": split,
        "squeeze": squeeze,
        "tile": tile,
        "transpose": transpose,
    }
)
# Of these, the ones whose results may be views of their x.
VIEWS = frozenset(
    ("expand_dims", "identity", "reshape", "slice_by_index", "slice_by_size", "split", "squeeze")
    + ("transpose",)
)
