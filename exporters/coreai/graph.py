"""Write the static layout (exporters/requests.py) as functions of a Core AI program, in float32.

The residual stream is [1, rows, hidden_size], heads are [1, heads, rows, head_dim]. Keys and values
of all layers and slots are one state, [2 * layers, kv_heads, slots, head_dim], the keys first:
every function writes it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Annotated, Any

import numpy as np
from coreai import authoring as ops
from coreai.authoring import AIProgram, Module, TensorSpec, Value
from coreai.authoring.constant import constant

from edge_spec.core.config import ModelConfig
from edge_spec.core.decoder_walk import DecoderWalk
from edge_spec.exporters.coreai.composites import Composites
from edge_spec.exporters.coreai.private import mark_states
from edge_spec.exporters.coreai.weights import CoreAiWeights
from edge_spec.exporters.requests import MASKED, StaticFunction, StaticShape, functions

STATE, _WRITTEN = "kv_cache", "kv_cache_written"
_ONES = np.ones(4, np.int32)


class CoreAiPass(DecoderWalk[Value]):
    """Build one function."""

    def __init__(
        self,
        weights: CoreAiWeights,
        config: ModelConfig,
        shape: StaticShape,
        rows: int,
        inputs: dict[str, Value],
        composites: Composites,
    ) -> None:
        self.config, self._weights, self._rows = config, weights, rows
        self._composites = composites
        self._slots, self._inputs = shape.slots, inputs
        self._new: dict[int, Value] = {}  # keys and values of the rows, by their index in the state
        self._begin = inputs["write_slot"]
        self._end = ops.add(self._begin, _ints(rows))
        position = ops.expand_dims(inputs["position_ids"], _ints(1))
        tables = config.rotations[0].tables(shape.context_length)
        self._cos, self._sin = (self._rotation(table, position) for table in tables)
        groups = config.num_heads // config.num_kv_heads
        mask = ops.tile(inputs["mask"], _counts(1, 1, groups, 1))  # for each query of a group
        self._is_seen = ops.broadcasting_greater(mask, np.array(MASKED / 2, np.float32))

    def outputs(self, scores: bool, hidden: bool) -> list[Value]:
        """Return a function's outputs, the written state last. hidden: scoring functions also
        return the hidden states."""
        config = self.config
        update, residual = None, self.embed()
        for layer in range(config.num_layers):
            update, residual = self.pass_layer(layer, update, residual)
        x, _ = self.add_and_norm(update, residual, "model.norm")
        outputs = [self.score(x)] if scores else []
        if hidden or not scores:
            outputs.append(ops.reshape(x, _ints(self._rows, config.hidden_size)))
        return [*outputs, self._written()]

    def look_up(self, table: str, output: str) -> Value:
        return self._weights.picked_rows(table, self._inputs["input_ids"], self._rows)

    def times(self, x: Value, scale: float, output: str) -> Value:
        assert scale == 1.0  # of a plain model
        return x

    def norm(self, x: Value, name: str, output: str = "") -> Value:
        norm = self._composites.norms[tuple(x.type.shape)]
        return norm(x, self._weights.vector(name + ".weight"))

    def add_and_norm(self, update: Value | None, residual: Value, name: str) -> tuple[Value, Value]:
        x = residual if update is None else ops.add(residual, update)
        return self.norm(x, name), x

    def linear(self, x: Value, prefix: str, parts: Sequence[str], has_bias: bool = False) -> Value:
        (name,) = (prefix + part for part in parts)
        product = ops.broadcasting_batch_matmul(x, self._weights.matrix(name + ".weight"))
        if not has_bias:
            return product
        return ops.broadcasting_add(product, self._weights.vector(name + ".bias"))

    def activation(self, x: Value, prefix: str) -> Value:
        return ops.silu(x)

    def product(self, x: Value, y: Value, output: str) -> Value:
        return ops.mul(x, y)

    def head(self, hidden: Value, output: str) -> Value:
        matrix = self._weights.matrix(self.head_name, is_head=True)
        scores = ops.broadcasting_batch_matmul(hidden, matrix)
        return ops.reshape(scores, _ints(self._rows, self.config.vocab_size))

    def attend(self, x: Value, layer: int) -> Value:
        config, prefix = self.config, f"model.layers.{layer}.self_attn."
        keys = self._write(layer, self.heads(x, layer, "k"))
        values = self._write(config.num_layers + layer, self.heads(x, layer, "v"))
        per_head = (config.num_heads // config.num_kv_heads) * self._rows
        shape = _ints(1, config.num_kv_heads, per_head, config.head_dim)
        queries = ops.reshape(self.heads(x, layer, "q"), shape)
        mixed = self._composites.attend(queries, keys, values, self._is_seen)
        each = ops.reshape(mixed, _ints(1, config.num_heads, self._rows, config.head_dim))
        joined = ops.reshape(_transposed(each, 0, 2, 1, 3), _ints(1, self._rows, config.query_size))
        return self.linear(joined, prefix, ["o_proj"], config.output_bias)

    def split_heads(self, x: Value, layer: int, part: str) -> Value:
        count = self.config.num_heads if part == "q" else self.config.num_kv_heads
        split = ops.reshape(x, _ints(1, self._rows, count, self.config.head_dim))
        return _transposed(split, 0, 2, 1, 3)

    def rotate(self, x: Value, layer: int, part: str) -> Value:
        return self._composites.rotations[tuple(x.type.shape)](x, self._cos, self._sin)

    def _rotation(self, table: np.ndarray, position: Value) -> Value:
        """Return cos or sin of the rows' positions, [1, 1, rows, head_dim / 2]."""
        picked = ops.gather_nd(constant(table), position)
        return ops.reshape(picked, _ints(1, 1, self._rows, table.shape[1]))

    def _write(self, index: int, new: Value) -> Value:
        """Put `new` [1, kv_heads, rows, head_dim] into the state, and return all of its slots."""
        kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        self._new[index] = new
        end = _ints(index + 1, kv_heads, self._slots, head_dim)
        before = ops.slice_(self._inputs[STATE], _ints(index, 0, 0, 0), end, _ONES)
        return self._updated(before, new, 1)

    def _written(self) -> Value:
        """Return the state with the rows of all layers, written at once: each write copies all of
        it in Core AI on Linux."""
        new = [self._new[index] for index in range(2 * self.config.num_layers)]
        return self._updated(self._inputs[STATE], ops.concat(_axis(0), new), len(new))

    def _updated(self, cache: Value, new: Value, size: int) -> Value:
        """cache: [size, kv_heads, slots, head_dim]; new: the same of the rows."""
        config, zero = self.config, constant(_ints(0))
        begin = ops.concat(_axis(0), [zero, zero, self._begin, zero])
        front, last = constant(_ints(size, config.num_kv_heads)), constant(_ints(config.head_dim))
        end = ops.concat(_axis(0), [front, self._end, last])
        return ops.slice_update(cache, begin, end, _ONES, new)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _axis(number: int) -> np.ndarray:
    return np.array(number, np.int32)


def _counts(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def _transposed(x: Value, *axes: int) -> Value:
    return ops.transpose(x, _counts(*axes))


def build_program(
    weights: CoreAiWeights,
    config: ModelConfig,
    shape: StaticShape,
    hidden: bool,
    on_function: Callable[[float], None],
) -> AIProgram:
    """hidden: scoring functions also return the hidden states. Raises RuntimeError, or another
    error of the library, if it rejects the program."""
    module, wanted = Module.create(), functions()
    with module:
        for i, function in enumerate(wanted):
            _add_function(weights, config, shape, function, hidden)
            on_function((i + 1) / len(wanted))
    module.verify()
    return AIProgram(module)


def _add_function(
    weights: CoreAiWeights,
    config: ModelConfig,
    shape: StaticShape,
    function: StaticFunction,
    hidden: bool,
) -> None:
    rows = function.rows
    composites = Composites(config, rows, shape.slots)
    cache = (2 * config.num_layers, config.num_kv_heads, shape.slots, config.head_dim)

    def body(
        input_ids: Value, position_ids: Value, write_slot: Value, mask: Value, kv_cache: Value
    ) -> tuple[Value, ...]:
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "write_slot": write_slot,
            "mask": mask,
            STATE: kv_cache,
        }
        run = CoreAiPass(weights, config, shape, rows, inputs, composites)
        return tuple(run.outputs(function.scores, hidden))

    returned = [_tensor("logits", rows, config.vocab_size)] if function.scores else []
    if hidden or not function.scores:
        returned.append(_tensor("hidden", rows, config.hidden_size))
    # The library reads a graph's signature from the annotations of its Python function.
    body.__annotations__ = {
        "input_ids": Annotated[Value, TensorSpec((1, rows), np.int32)],
        "position_ids": Annotated[Value, TensorSpec((rows,), np.int32)],
        "write_slot": Annotated[Value, TensorSpec((1,), np.int32)],
        "mask": Annotated[Value, TensorSpec((1, 1, rows, shape.slots), np.float32)],
        STATE: Annotated[Value, TensorSpec(cache, np.float32)],
        "return": GenericAlias(tuple, (*returned, _tensor(_WRITTEN, *cache))),
    }
    mark_states(ops.graph(body, provided_name=function.name), {STATE: _WRITTEN})


def _tensor(name: str, *shape: int) -> Any:
    return Annotated[Value, TensorSpec(shape, np.float32, name=name)]
