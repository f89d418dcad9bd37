"""Operations of Core ML programs that move, choose or compare numbers, in numpy.

Names, arguments and defaults are those of MIL up to iOS 18. Results need no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np


def equal(x: Any, y: Any) -> Any:
    return x == y


def greater_equal(x: Any, y: Any) -> Any:
    return x >= y


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
    return np.expand_dims(x, tuple(np.ravel(axes).tolist()))


def squeeze(x: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.squeeze(x, None if axes is None else tuple(np.ravel(axes).tolist()))


def tile(x: Any, reps: Any) -> Any:
    return np.tile(x, np.ravel(reps).tolist())


def select(cond: Any, a: Any, b: Any) -> Any:
    return np.where(cond, a, b)


def identity(x: Any) -> Any:
    return x


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
        else slice(None if from_start[i] else begins[i], None if to_end[i] else ends[i], strides[i])
        for i in range(rank)
    )


MOVEMENT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "concat": concat,
        "equal": equal,
        "expand_dims": expand_dims,
        "gather": gather,
        "gather_along_axis": gather_along_axis,
        "greater_equal": greater_equal,
        "identity": identity,
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
SLICES = frozenset({"slice_by_index", "slice_by_size"})
VIEWS = SLICES | {"expand_dims", "identity", "reshape", "split", "squeeze", "transpose"}
