"""Compares the plugin's results with ggml's own, in an isolated process: another build's structures
may crash it. Nothing is freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_spec.runtimes.llamacpp.rows.library import TYPES, function

_F32, _F16, _I32 = 0, 1, 26
_HANDLE, _INT, _SIZE, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_COLUMNS, _OUTPUTS = 512, 40  # of a matrix; a partial last tile of outputs
_ROWS = 11  # more than a panel
# Both round activations to 8 bits, differently: results differ by less than 1%, a wrong kernel's by
# 100%.
_TOLERANCE = 0.03


class _InitParams(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("buffer", _HANDLE), ("no_alloc", ctypes.c_bool))


_FLOAT = ctypes.c_float
_BOUND: tuple[tuple[str, list[Any], Any], ...] = (
    ("init", [_InitParams], _HANDLE),
    ("new_tensor_4d", [_HANDLE, _INT, _LONG, _LONG, _LONG, _LONG], _HANDLE),
    ("mul_mat", [_HANDLE, _HANDLE, _HANDLE], _HANDLE),
    ("mul_mat_id", [_HANDLE, _HANDLE, _HANDLE, _HANDLE], _HANDLE),
    ("flash_attn_ext", [_HANDLE] * 5 + [_FLOAT] * 3, _HANDLE),
    ("permute", [_HANDLE, _HANDLE] + [_INT] * 4, _HANDLE),
    ("reshape_3d", [_HANDLE, _HANDLE, _LONG, _LONG, _LONG], _HANDLE),
    ("new_graph", [_HANDLE], _HANDLE),
    ("build_forward_expand", [_HANDLE, _HANDLE], None),
    ("nbytes", [_HANDLE], _SIZE),
    ("row_size", [_INT, _LONG], _SIZE),
    ("quantize_chunk", [_INT, _HANDLE, _HANDLE, _LONG, _LONG, _LONG, _HANDLE], _SIZE),
    ("backend_cpu_init", [], _HANDLE),
    ("backend_cpu_set_n_threads", [_HANDLE, _INT], None),
    ("backend_cpu_buffer_type", [], _HANDLE),
    ("backend_alloc_ctx_tensors_from_buft", [_HANDLE, _HANDLE], _HANDLE),
    ("backend_tensor_set", [_HANDLE, _HANDLE, _SIZE, _SIZE], None),
    ("backend_tensor_get", [_HANDLE, _HANDLE, _SIZE, _SIZE], None),
    ("backend_supports_op", [_HANDLE, _HANDLE], ctypes.c_bool),
    ("backend_graph_compute", [_HANDLE, _HANDLE], _INT),
)


class WrongError(Exception):
    """The plugin computes wrongly; one line says how."""


def run(path: str) -> dict[str, Any]:
    """Install the plugin into this process's ggml and test it. Raises WrongError; OSError or
    AttributeError for a missing library or function."""
    ggml = ctypes.CDLL(path)
    every = (1 << len(TYPES)) - 1
    reason = function("install")(ggml._handle, every, 1)
    if reason is not None:
        raise WrongError(reason.decode())
    takes_attention = function("takes")() & 2 != 0
    test = _Test(ggml)
    for name in TYPES:
        test.check_products(name)
    test.check_experts("Q8_0")
    if takes_attention:
        test.check_attention("F16")
        test.check_attention("Q8_0")
    return {"types": list(TYPES), "attention": takes_attention}


class _Test:
    """Shapes are numpy's: their last axis is ggml's first."""

    def __init__(self, ggml: Any) -> None:
        self._ggml = ggml
        for name, arguments, result in _BOUND:
            bound = getattr(ggml, f"ggml_{name}")
            bound.argtypes, bound.restype = arguments, result
        self._random = np.random.default_rng(42)
        self._backend = ggml.ggml_backend_cpu_init()
        self._cpu = ggml.ggml_backend_cpu_buffer_type()
        self._ours = function("buffer_type")()

    def check_products(self, name: str) -> None:
        def product(weight: int, rows: np.ndarray, num_threads: int) -> np.ndarray:
            context = self._context()
            x = self._tensor(context, _F32, *rows.shape)
            out = self._ggml.ggml_mul_mat(context, weight, x)
            return self._computed(context, out, {x: rows}, num_threads).reshape(len(rows), -1)

        given = self._numbers(_ROWS, _COLUMNS)
        stock, packed = self._both(TYPES[name], (_OUTPUTS, _COLUMNS))
        ours = product(packed, given, 1)
        _require_close(f"products of {name}", ours, product(stock, given, 1))
        threads = 2 if name == "Q8_0" else 1  # they wait for each other on a busy machine
        for part in (slice(0, 1), slice(1, 3), slice(3, _ROWS)):
            _require_equal(name, product(packed, given[part], threads), ours[part])

    def check_experts(self, name: str) -> None:
        num_experts, used, tokens = 3, 2, 6
        given = self._numbers(tokens, 1, _COLUMNS)
        chosen = self._random.permuted(np.tile(np.arange(num_experts), (tokens, 1)), axis=1)
        chosen = chosen[:, :used].astype(np.int32)

        def product(weight: int, part: slice) -> np.ndarray:
            context, rows = self._context(), given[part]
            x = self._tensor(context, _F32, *rows.shape)
            ids = self._tensor(context, _I32, len(rows), used)
            out = self._ggml.ggml_mul_mat_id(context, weight, x, ids)
            inputs = {x: rows, ids: chosen[part]}
            return self._computed(context, out, inputs, min(2, len(rows))).reshape(len(rows), -1)

        stock, packed = self._both(TYPES[name], (num_experts, _OUTPUTS, _COLUMNS))
        ours = product(packed, slice(tokens))
        _require_close(f"experts of {name}", ours, product(stock, slice(tokens)))
        for part in (slice(token, token + 1) for token in range(tokens)):
            _require_equal(f"experts of {name}", product(packed, part), ours[part])

    def check_attention(self, name: str) -> None:
        size, heads, kv_heads, cells, tokens = 64, 4, 2, 48, 5
        kind, width = TYPES[name], size * heads
        given, caches = self._numbers(tokens, _COLUMNS), self._numbers(2, kv_heads, cells, size)
        _, weight = self._both(TYPES["Q8_0"], (width, _COLUMNS))
        seen = np.arange(cells) <= np.arange(cells - tokens, cells)[:, None]
        mask_rows = np.where(seen, 0, -np.inf).astype(np.float32)

        def attended(part: slice, queries: np.ndarray | None) -> list[np.ndarray]:
            """Return the rows and their queries, computed by ggml if queries are given."""
            context, rows = self._context(), given[part]
            x = self._tensor(context, _F32, *rows.shape)
            q = self._tensor(context, _F32, len(rows), width)
            made = self._ggml.ggml_mul_mat(context, weight, x)
            k, v = (self._tensor(context, kind, *each.shape) for each in caches)
            mask = self._tensor(context, _F16, len(rows), cells)
            source = made if queries is None else q
            shaped = self._ggml.ggml_reshape_3d(context, source, size, heads, len(rows))
            turned = self._ggml.ggml_permute(context, shaped, 0, 2, 1, 3)
            out = self._ggml.ggml_flash_attn_ext(context, turned, k, v, mask, 0.125, 0.0, 0.0)
            inputs = {
                x: rows,
                q: np.zeros((len(rows), width), np.float32) if queries is None else queries,
                k: self._stored(kind, caches[0]),
                v: self._stored(kind, caches[1]),
                mask: self._stored(_F16, mask_rows[part]),
            }
            found = self._computed(context, out, inputs, min(2, len(rows)), made)
            return [found.reshape(len(rows), -1), self._read(made)]

        ours, queries = attended(slice(tokens), None)
        _require_close(f"attention to {name}", ours, attended(slice(tokens), queries)[0])
        for part in (slice(token, token + 1) for token in range(tokens)):
            _require_equal(f"attention to {name}", attended(part, None)[0], ours[part])

    def _numbers(self, *shape: int) -> np.ndarray:
        return self._random.random(shape, np.float32) - np.float32(0.5)

    def _context(self) -> int:
        context: int = self._ggml.ggml_init(_InitParams(200_000, None, True))
        return context

    def _tensor(self, context: int, kind: int, *shape: int) -> int:
        sizes = (*shape[::-1], 1, 1, 1)[:4]
        tensor: int = self._ggml.ggml_new_tensor_4d(context, kind, *sizes)
        return tensor

    def _both(self, kind: int, shape: tuple[int, ...]) -> list[int]:
        """Return a weight in ggml's buffer and in ours."""
        values, found = self._stored(kind, self._numbers(*shape)), []
        for buffer_type in (self._cpu, self._ours):
            context = self._context()
            found.append(self._tensor(context, kind, *shape))
            self._allocate(context, buffer_type)
            self._set(found[-1], values)
        return found

    def _allocate(self, context: int, buffer_type: int) -> None:
        if not self._ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type):
            raise WrongError("ggml could not allocate a buffer")

    def _stored(self, kind: int, numbers: np.ndarray) -> np.ndarray:
        if kind == _F32:
            return numbers
        columns, source = numbers.shape[-1], np.ascontiguousarray(numbers)
        rows = numbers.size // columns
        out = np.empty(self._ggml.ggml_row_size(kind, columns) * rows, np.uint8)
        self._ggml.ggml_quantize_chunk(
            kind, source.ctypes.data, out.ctypes.data, 0, rows, columns, None
        )
        return out

    def _set(self, tensor: int, values: np.ndarray) -> None:
        source = np.ascontiguousarray(values)
        if source.nbytes != self._ggml.ggml_nbytes(tensor):
            raise WrongError("a tensor of ggml has another size than its values")
        self._ggml.ggml_backend_tensor_set(tensor, source.ctypes.data, 0, source.nbytes)

    def _computed(
        self,
        context: int,
        out: int,
        inputs: Mapping[int, np.ndarray],
        num_threads: int,
        *others: int,
    ) -> np.ndarray:
        graph = self._ggml.ggml_new_graph(context)
        for tensor in (out, *others):
            self._ggml.ggml_build_forward_expand(graph, tensor)
        self._allocate(context, self._cpu)
        for tensor, values in inputs.items():
            self._set(tensor, values)
        if not self._ggml.ggml_backend_supports_op(self._backend, out):
            raise WrongError("ggml does not take an operation on packed weights")
        self._ggml.ggml_backend_cpu_set_n_threads(self._backend, num_threads)
        if self._ggml.ggml_backend_graph_compute(self._backend, graph) != 0:
            raise WrongError("ggml could not compute a graph")
        return self._read(out)

    def _read(self, tensor: int) -> np.ndarray:
        found = np.empty(self._ggml.ggml_nbytes(tensor) // 4, np.float32)
        self._ggml.ggml_backend_tensor_get(tensor, found.ctypes.data, 0, found.nbytes)
        return found


def _require_close(what: str, ours: np.ndarray, stock: np.ndarray) -> None:
    size, off = (float(np.linalg.norm(each)) for each in (stock, ours - stock))
    if not off <= _TOLERANCE * size:
        raise WrongError(f"{what} differ from ggml's by {off / size:.2g} of their size")


def _require_equal(what: str, part: np.ndarray, whole: np.ndarray) -> None:
    if part.tobytes() != whole.tobytes():
        raise WrongError(f"rows of {what} differ with the rows beside them")
