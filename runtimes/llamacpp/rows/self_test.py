"""What the plugin computes in ggml's graphs, held against ggml's own kernels.

Runs in a process of its own, since a build whose structures are others may crash it. Nothing but
ctypes is needed: numbers are few, and importing numpy would take longer than the test.
"""

from __future__ import annotations

import ctypes
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from edge_spec.runtimes.llamacpp.rows.library import TYPES, function

_F32, _F16, _I32 = 0, 1, 26
_HANDLE, _INT, _SIZE, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_COLUMNS, _OUTPUTS = 512, 40  # of a matrix; the outputs fill no whole number of tiles
_ROWS = 11  # more than one panel has
# Activations are rounded to 8 bits by both, in other blocks or another way: less than 1 % of what
# comes out. A kernel that is wrong is off by all of it.
_TOLERANCE = 0.03


class _InitParams(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("buffer", _HANDLE), ("no_alloc", ctypes.c_bool))


_FLOAT = ctypes.c_float
_BOUND: tuple[tuple[str, list[Any], Any], ...] = (
    ("init", [_InitParams], _HANDLE),
    ("free", [_HANDLE], None),
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
    ("backend_free", [_HANDLE], None),
    ("backend_cpu_set_n_threads", [_HANDLE, _INT], None),
    ("backend_cpu_buffer_type", [], _HANDLE),
    ("backend_alloc_ctx_tensors_from_buft", [_HANDLE, _HANDLE], _HANDLE),
    ("backend_buffer_free", [_HANDLE], None),
    ("backend_tensor_set", [_HANDLE, _HANDLE, _SIZE, _SIZE], None),
    ("backend_tensor_get", [_HANDLE, _HANDLE, _SIZE, _SIZE], None),
    ("backend_supports_op", [_HANDLE, _HANDLE], ctypes.c_bool),
    ("backend_graph_compute", [_HANDLE, _HANDLE], _INT),
)


class WrongError(Exception):
    """Says in one line what is wrong."""


def run(path: str) -> dict[str, Any]:
    """Installs the plugin into ggml's library of this process and tests it. Raises WrongError,
    OSError or AttributeError where a library or a function is missing."""
    ggml = ctypes.CDLL(path)
    every = (1 << len(TYPES)) - 1
    reason = function("install")(ggml._handle, every, 1)
    if reason is not None:
        raise WrongError(reason.decode())
    takes_attention = function("takes")() & 2 != 0
    with _Test(ggml).opened() as test:
        for name in TYPES:
            test.check_products(name)
        test.check_experts("Q8_0")
        if takes_attention:
            test.check_attention("F16")
            test.check_attention("Q8_0")
    return {"types": list(TYPES), "attention": takes_attention}


class _Test:
    def __init__(self, ggml: Any) -> None:
        self._ggml = ggml
        for name, arguments, result in _BOUND:
            bound = getattr(ggml, f"ggml_{name}")
            bound.argtypes, bound.restype = arguments, result
        self._random = random.Random(42)
        self._backend = 0
        self._buffers: list[int] = []
        self._contexts: list[int] = []
        self._cpu = ggml.ggml_backend_cpu_buffer_type()
        self._ours = function("buffer_type")()
        self._weights = self._numbers(3 * _OUTPUTS * _COLUMNS)

    @contextmanager
    def opened(self) -> Iterator[_Test]:
        self._backend = self._ggml.ggml_backend_cpu_init()
        try:
            yield self
        finally:
            for buffer in self._buffers:
                self._ggml.ggml_backend_buffer_free(buffer)
            for context in self._contexts:
                self._ggml.ggml_free(context)
            self._ggml.ggml_backend_free(self._backend)

    def check_products(self, name: str) -> None:
        given = self._numbers(_ROWS * _COLUMNS)

        def product(buffer_type: int, rows: Sequence[float], num_threads: int) -> list[float]:
            weight = weights[buffer_type]
            context = self._context()
            x = self._tensor(context, _F32, _COLUMNS, len(rows) // _COLUMNS)
            out = self._ggml.ggml_mul_mat(context, weight, x)
            return self._computed(context, out, {x: array("f", rows)}, num_threads)

        weights = {
            kind: self._packed(kind, TYPES[name], (_COLUMNS, _OUTPUTS, 1))
            for kind in (self._cpu, self._ours)
        }
        stock = product(self._cpu, given, 1)
        ours = product(self._ours, given, 1)
        _require_close(f"products of {name}", ours, stock)
        threads = 2 if name == "Q8_0" else 1  # on a busy machine they wait for each other
        for first, last in ((0, 1), (1, 3), (3, _ROWS)):
            part = product(self._ours, given[first * _COLUMNS : last * _COLUMNS], threads)
            _require_equal(name, part, ours[first * _OUTPUTS : last * _OUTPUTS])

    def check_experts(self, name: str) -> None:
        num_experts, used, tokens = 3, 2, 6
        given = self._numbers(tokens * _COLUMNS)
        chosen = [e for _ in range(tokens) for e in self._random.sample(range(num_experts), used)]

        def product(weight: int, first: int, last: int) -> list[float]:
            context = self._context()
            x = self._tensor(context, _F32, _COLUMNS, 1, last - first)
            ids = self._tensor(context, _I32, used, last - first)
            out = self._ggml.ggml_mul_mat_id(context, weight, x, ids)
            inputs = {
                x: array("f", given[first * _COLUMNS : last * _COLUMNS]),
                ids: array("i", chosen[first * used : last * used]),
            }
            return self._computed(context, out, inputs, min(2, last - first))

        shape = (_COLUMNS, _OUTPUTS, num_experts)
        stock, ours = (
            product(self._packed(kind, TYPES[name], shape), 0, tokens)
            for kind in (self._cpu, self._ours)
        )
        _require_close(f"experts of {name}", ours, stock)
        weight, row = self._packed(self._ours, TYPES[name], shape), used * _OUTPUTS
        for token in range(tokens):
            part = product(weight, token, token + 1)
            _require_equal(f"experts of {name}", part, ours[token * row : (token + 1) * row])

    def check_attention(self, name: str) -> None:
        size, heads, kv_heads, cells, tokens = 64, 4, 2, 48, 5
        given = self._numbers(tokens * _COLUMNS)
        kind = TYPES[name]
        weight = self._packed(self._ours, TYPES["Q8_0"], (_COLUMNS, size * heads, 1))
        caches = [self._numbers(size * cells * kv_heads) for _ in range(2)]
        minus = float("-inf")
        rows = [
            [0.0 if c <= cells - tokens + t else minus for c in range(cells)] for t in range(tokens)
        ]

        def attended(first: int, last: int, queries: Sequence[float] | None) -> list[list[float]]:
            """The rows and their queries, which are given where ggml is to compute."""
            context, count = self._context(), last - first
            x = self._tensor(context, _F32, _COLUMNS, count)
            q = self._tensor(context, _F32, size * heads, count)
            made = self._ggml.ggml_mul_mat(context, weight, x)
            k, v = (self._tensor(context, kind, size, cells, kv_heads) for _ in range(2))
            mask = self._tensor(context, _F16, cells, count)
            source = made if queries is None else q
            shaped = self._ggml.ggml_reshape_3d(context, source, size, heads, count)
            turned = self._ggml.ggml_permute(context, shaped, 0, 2, 1, 3)
            out = self._ggml.ggml_flash_attn_ext(context, turned, k, v, mask, 0.125, 0.0, 0.0)
            inputs = {
                x: array("f", given[first * _COLUMNS : last * _COLUMNS]),
                q: array("f", queries or [0.0] * (size * heads * count)),
                k: self._stored(kind, caches[0], size),
                v: self._stored(kind, caches[1], size),
                mask: self._stored(_F16, [m for row in rows[first:last] for m in row], cells),
            }
            self._computed(context, out, inputs, min(2, last - first), made)
            return [self._read(out), self._read(made)]

        ours, queries = attended(0, tokens, None)
        stock, _ = attended(0, tokens, queries)
        _require_close(f"attention to {name}", ours, stock)
        row = size * heads
        for token in range(tokens):
            part, _ = attended(token, token + 1, None)
            _require_equal(f"attention to {name}", part, ours[token * row : (token + 1) * row])

    def _numbers(self, count: int) -> list[float]:
        return [self._random.random() - 0.5 for _ in range(count)]

    def _context(self) -> int:
        context: int = self._ggml.ggml_init(_InitParams(200_000, None, True))
        self._contexts.append(context)
        return context

    def _tensor(self, context: int, kind: int, *shape: int) -> int:
        sizes = (*shape, 1, 1, 1)[:4]
        tensor: int = self._ggml.ggml_new_tensor_4d(context, kind, *sizes)
        return tensor

    def _packed(self, buffer_type: int, kind: int, shape: tuple[int, int, int]) -> int:
        """A weight of these sizes in a buffer of this type."""
        context = self._context()
        weight = self._tensor(context, kind, *shape)
        self._allocate(context, buffer_type)
        numbers = self._weights[: math.prod(shape)]
        if len(numbers) < math.prod(shape):
            numbers = self._numbers(math.prod(shape))
        self._set(weight, self._stored(kind, numbers, shape[0]))
        return weight

    def _allocate(self, context: int, buffer_type: int) -> None:
        buffer = self._ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            raise WrongError("ggml could not allocate a buffer")
        self._buffers.append(buffer)

    def _stored(self, kind: int, numbers: Sequence[float], columns: int) -> Any:
        """Numbers as a file of this type has them."""
        source = array("f", numbers)
        if kind == _F32:
            return source
        num_rows = len(numbers) // columns
        out = (ctypes.c_uint8 * (self._ggml.ggml_row_size(kind, columns) * num_rows))()
        address = source.buffer_info()[0]
        self._ggml.ggml_quantize_chunk(kind, address, out, 0, num_rows, columns, None)
        return out

    def _set(self, tensor: int, values: Any) -> None:
        if isinstance(values, array):
            address, size = values.buffer_info()[0], len(values) * values.itemsize
        else:
            address, size = ctypes.addressof(values), ctypes.sizeof(values)
        if size != self._ggml.ggml_nbytes(tensor):
            raise WrongError("a tensor of ggml has another size than its values")
        self._ggml.ggml_backend_tensor_set(tensor, address, 0, size)

    def _computed(
        self, context: int, out: int, inputs: dict[int, Any], num_threads: int, *others: int
    ) -> list[float]:
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

    def _read(self, tensor: int) -> list[float]:
        size = self._ggml.ggml_nbytes(tensor)
        found = (ctypes.c_float * (size // 4))()
        self._ggml.ggml_backend_tensor_get(tensor, found, 0, size)
        return list(found)


def _require_close(what: str, ours: Sequence[float], stock: Sequence[float]) -> None:
    size = math.sqrt(sum(value * value for value in stock))
    off = math.sqrt(sum((a - b) ** 2 for a, b in zip(ours, stock, strict=True)))
    if not off <= _TOLERANCE * size:
        raise WrongError(f"{what} differ from ggml's by {off / size:.2g} of their size")


def _require_equal(what: str, part: Sequence[float], whole: Sequence[float]) -> None:
    if array("f", part).tobytes() != array("f", whole).tobytes():
        raise WrongError(f"rows of {what} differ with the rows beside them")
