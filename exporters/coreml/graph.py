"""Write the static layout (exporters/requests.py) as functions of a Core ML program.

GPU and Neural Engine have different layouts. GPU: Apple's "On Device Llama 3.1 with Core ML"
(2024): linear layers, fused attention, a state for keys and one for values. Neural Engine: Apple's
"Deploying Transformers on the Apple Neural Engine" (2022) and ANEMLL 0.3.4: rows last, 1x1
convolutions, explicit attention, a layer norm of [x, -x], a head in parts, one state.

In both, heads are [1, heads, rows, head_dim], keys and values [1, kv_heads, slots, head_dim], and
`logits` outputs [rows, part], to concatenate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as ops  # noqa: N813
from coremltools.converters.mil import Function, Program
from coremltools.converters.mil.mil import types

from edge_spec.core.config import ModelConfig
from edge_spec.core.decoder_walk import DecoderWalk
from edge_spec.exporters.coreml.weights import CoreMlWeights, Var, constant
from edge_spec.exporters.requests import StaticShape, functions

ANE_MAX_SIZE = 16384  # largest dimension that stays on the Neural Engine


class CoreMlPass(DecoderWalk[Var]):
    """Build one function."""

    states: Callable[[ModelConfig, int], dict[str, tuple[int, ...]]]  # shapes, for so many slots
    # For a layer, the state and index of its keys, and of its values.
    place: Callable[[int], tuple[tuple[str, int], tuple[str, int]]]
    join_heads: Callable[[Var], Var]
    mix: Callable[[Var, Var, Var, Var], Var]  # (queries, keys, values, mask)
    flat: Callable[[Var, str], Var]  # (x, name): the stream as output [rows, hidden_size]
    logits: Callable[[Var, str], list[Var]]

    def __init__(
        self,
        weights: CoreMlWeights,
        config: ModelConfig,
        shape: StaticShape,
        rows: int,
        inputs: dict[str, Var],
    ) -> None:
        self.weights, self.config, self.rows = weights, config, rows
        self._shape, self._inputs = shape, inputs
        self._cache = {name: ops.read_state(input=inputs[name]) for name in self.states(config, 0)}
        write_slot = inputs["write_slot"]
        self._begin = [write_slot, np.array([0], np.int32)]
        self._end = [
            ops.add(x=write_slot, y=np.array([rows], np.int32)),
            np.array([config.head_dim], np.int32),
        ]
        self._cos, self._sin = self._rotations()
        groups = config.num_heads // config.num_kv_heads
        self._mask = ops.tile(x=inputs["mask"], reps=[1, 1, groups, 1])  # for each query of a group

    def outputs(self, scores: bool, hidden: bool) -> list[Var]:
        """hidden: scoring functions return the hidden states as well."""
        config = self.config
        update, residual = None, self.embed()
        for layer in range(config.num_layers):
            update, residual = self.pass_layer(layer, update, residual)
        x, _ = self.add_and_norm(update, residual, "model.norm")
        outputs = []
        if scores:
            outputs = self.logits(x, self.head_name)
        if hidden or not scores:
            outputs.append(self.flat(x, "hidden"))
        return outputs

    def times(self, x: Var, scale: float, output: str) -> Var:
        assert scale == 1.0  # plain models do not scale
        return x

    def add_and_norm(self, update: Var | None, residual: Var, name: str) -> tuple[Var, Var]:
        x = residual if update is None else ops.add(x=residual, y=update)
        return self.norm(x, name), x

    def gate(self, x: Var, prefix: str) -> Var:
        gate, up = (self.linear(x, prefix, [f"{part}_proj"]) for part in ("gate", "up"))
        return ops.mul(x=ops.silu(x=gate), y=up)

    def attend(self, x: Var, layer: int) -> Var:
        config, prefix = self.config, f"model.layers.{layer}.self_attn."
        key_place, value_place = self.place(layer)
        keys = self._write(key_place, self.heads(x, layer, "k"))
        values = self._write(value_place, self.heads(x, layer, "v"))
        # Query heads that share keys are extra rows of one head, so that no key is repeated.
        per_head = (config.num_heads // config.num_kv_heads) * self.rows
        shape = (1, config.num_kv_heads, per_head, config.head_dim)
        queries = ops.reshape(x=self.heads(x, layer, "q"), shape=shape)
        mixed = self.mix(queries, keys, values, self._mask)
        each = ops.reshape(x=mixed, shape=(1, config.num_heads, self.rows, config.head_dim))
        return self.linear(self.join_heads(each), prefix, ["o_proj"], config.output_bias)

    def _rotations(self) -> tuple[Var, Var]:
        """Return cos and sin of the rows' positions, [1, 1, rows, head_dim / 2]."""
        found = []
        tables = self.config.rotations[0].tables(self._shape.context_length)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            stored = constant(name, table.astype(self.weights.dtype))
            picked = ops.gather(x=stored, indices=self._inputs["position_ids"], axis=0)
            found.append(ops.expand_dims(x=picked, axes=[0, 1]))
        return found[0], found[1]

    def _count(self, part: str) -> int:
        return self.config.num_heads if part == "q" else self.config.num_kv_heads

    def rotate(self, x: Var, layer: int, part: str) -> Var:
        """Rotate x: [1, heads, rows, head_dim], pairing halves (Su et al. 2021)."""
        first, second = ops.split(x=x, num_splits=2, axis=-1)
        cos, sin = self._cos, self._sin
        turned = [
            ops.sub(x=ops.mul(x=first, y=cos), y=ops.mul(x=second, y=sin)),
            ops.add(x=ops.mul(x=second, y=cos), y=ops.mul(x=first, y=sin)),
        ]
        return ops.concat(values=turned, axis=-1)

    def _write(self, place: tuple[str, int], new: Var) -> Var:
        """Write `new` [1, kv_heads, rows, head_dim] to a state; return [1, kv_heads, slots,
        head_dim]."""
        name, index = place
        kv_heads = self.config.num_kv_heads
        updated = ops.slice_update(
            x=self._cache[name],
            update=new,
            begin=ops.concat(values=[np.array([index, 0], np.int32), *self._begin], axis=0),
            end=ops.concat(values=[np.array([index + 1, kv_heads], np.int32), *self._end], axis=0),
        )
        cache = ops.coreml_update_state(state=self._inputs[name], value=updated)
        self._cache[name] = cache
        end = [index + 1, kv_heads, self._shape.slots, self.config.head_dim]
        return ops.slice_by_index(x=cache, begin=[index, 0, 0, 0], end=end)


class GpuPass(CoreMlPass):
    """The stream is [1, rows, hidden_size]."""

    def look_up(self, table: str, output: str) -> Var:
        stored = self.weights.head(table, slice(0, self.config.vocab_size))
        return ops.gather(x=stored, indices=self._inputs["input_ids"], axis=0)

    def norm(self, x: Var, name: str, output: str = "") -> Var:
        """Compute in float32: squares of large activations exceed float16."""
        wide = ops.cast(x=x, dtype="fp32")
        mean = ops.reduce_mean(x=ops.mul(x=wide, y=wide), axes=[-1], keep_dims=True)
        scale = ops.rsqrt(x=mean, epsilon=np.float32(self.config.norm_epsilon))
        normed = ops.mul(x=wide, y=scale)
        if self.weights.dtype is np.float16:
            normed = ops.cast(x=normed, dtype="fp16")
        return ops.mul(x=normed, y=self.weights.vector(name + ".weight"))

    def linear(self, x: Var, prefix: str, parts: Sequence[str], has_bias: bool = False) -> Var:
        (name,) = (prefix + part for part in parts)
        weight = self.weights.matrix(name + ".weight")
        return self._linear(x, name + ".weight", weight, name + ".bias" if has_bias else None)

    def _linear(self, x: Var, name: str, weight: Var, bias: str | None = None) -> Var:
        if bias is None:
            added = self.weights.zeros(name, weight.shape[0])
        else:
            added = self.weights.vector(bias)
        return ops.linear(x=x, weight=weight, bias=added)

    def split_heads(self, x: Var, layer: int, part: str) -> Var:
        shape = (1, self.rows, self._count(part), self.config.head_dim)
        split = ops.reshape(x=x, shape=shape)
        return ops.transpose(x=split, perm=[0, 2, 1, 3])

    def join_heads(self, x: Var) -> Var:
        joined = ops.transpose(x=x, perm=[0, 2, 1, 3])
        return ops.reshape(x=joined, shape=(1, self.rows, self.config.query_size))

    def mix(self, queries: Var, keys: Var, values: Var, mask: Var) -> Var:
        return ops.scaled_dot_product_attention(
            query=queries, key=keys, value=values, attn_mask=mask
        )

    def flat(self, x: Var, name: str) -> Var:
        return ops.reshape(x=x, shape=(self.rows, self.config.hidden_size), name=name)

    def logits(self, x: Var, name: str) -> list[Var]:
        head = self.weights.head(name, slice(0, self.config.vocab_size))
        shape = (self.rows, self.config.vocab_size)
        return [ops.reshape(x=self._linear(x, name, head), shape=shape, name="logits")]

    @staticmethod
    def states(config: ModelConfig, slots: int) -> dict[str, tuple[int, ...]]:
        shape = (config.num_layers, config.num_kv_heads, slots, config.head_dim)
        return {"keys": shape, "values": shape}

    def place(self, layer: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("keys", layer), ("values", layer)


class AnePass(CoreMlPass):
    """The stream is [1, hidden_size, 1, rows]."""

    def look_up(self, table: str, output: str) -> Var:
        """Gather from the head's parts, so that tied weights are stored once. Each part gives zeros
        for other parts' rows."""
        found: Any = None
        ids, dtype = self._inputs["input_ids"], self.weights.dtype
        for part in self._parts():
            stored = self.weights.head(table, part, 2)
            local = ops.sub(x=ids, y=np.int32(part.start))
            last = np.int32(part.stop - part.start - 1)
            inside = ops.minimum(x=ops.maximum(x=local, y=np.int32(0)), y=last)
            here = ops.cast(x=ops.equal(x=local, y=inside), dtype=_name(dtype))
            picked = ops.reshape(
                x=ops.gather(x=stored, indices=inside, axis=0),
                shape=(1, self.rows, self.config.hidden_size),
            )
            picked = ops.mul(x=picked, y=ops.reshape(x=here, shape=(1, self.rows, 1)))
            found = picked if found is None else ops.add(x=found, y=picked)
        return ops.expand_dims(x=ops.transpose(x=found, perm=[0, 2, 1]), axes=[2])

    def _parts(self) -> list[slice]:
        """Split the vocabulary into parts that fit the Neural Engine."""
        size = self.config.vocab_size
        borders = np.linspace(0, size, -(-size // ANE_MAX_SIZE) + 1).astype(int).tolist()
        return [slice(*ends) for ends in pairwise(borders)]

    def norm(self, x: Var, name: str, output: str = "") -> Var:
        return self._norm(x, name, axis=1, shape=(1, -1, 1, 1))

    def norm_heads(self, x: Var, name: str) -> Var:
        return self._norm(x, name, axis=3, shape=(1, 1, 1, -1))

    def _norm(self, x: Var, name: str, axis: int, shape: tuple[int, ...]) -> Var:
        """Compute an RMS norm of x as the layer norm of [x, -x], whose mean is 0: one operation
        with wide sums on the Neural Engine."""
        size = x.shape[axis]
        both = ops.concat(values=[x, ops.mul(x=x, y=self.weights.dtype(-1))], axis=axis)
        epsilon = self.weights.dtype(self.config.norm_epsilon)
        normed = ops.layer_norm(x=both, axes=[axis], epsilon=epsilon)
        end = [size if i == axis else length for i, length in enumerate(x.shape)]
        half = ops.slice_by_index(x=normed, begin=[0, 0, 0, 0], end=end)
        weight = self.weights.vector(name + ".weight")
        return ops.mul(x=half, y=ops.reshape(x=weight, shape=shape))

    def linear(self, x: Var, prefix: str, parts: Sequence[str], has_bias: bool = False) -> Var:
        (name,) = (prefix + part for part in parts)
        added = {"bias": self.weights.vector(name + ".bias")} if has_bias else {}
        return ops.conv(x=x, weight=self.weights.matrix(name + ".weight", 2), **added)

    def split_heads(self, x: Var, layer: int, part: str) -> Var:
        shape = (1, self._count(part), self.config.head_dim, self.rows)
        split = ops.reshape(x=x, shape=shape)
        return ops.transpose(x=split, perm=[0, 1, 3, 2])

    def join_heads(self, x: Var) -> Var:
        joined = ops.transpose(x=x, perm=[0, 1, 3, 2])
        return ops.reshape(x=joined, shape=(1, self.config.query_size, 1, self.rows))

    def mix(self, queries: Var, keys: Var, values: Var, mask: Var) -> Var:
        scale = self.weights.dtype(self.config.head_dim**-0.5)
        scaled = ops.mul(x=queries, y=scale)  # first, so that products stay within float16
        scores = ops.add(x=ops.matmul(x=scaled, y=keys, transpose_y=True), y=mask)
        return ops.matmul(x=ops.softmax(x=scores, axis=-1), y=values)

    def flat(self, x: Var, name: str) -> Var:
        """[1, size, 1, rows] -> [rows, size], named `name`."""
        return ops.transpose(x=ops.squeeze(x=x, axes=[0, 2]), perm=[1, 0], name=name)

    def logits(self, x: Var, name: str) -> list[Var]:
        outputs, parts = [], self._parts()
        for i, part in enumerate(parts):
            scores = ops.conv(x=x, weight=self.weights.head(name, part, 2))
            outputs.append(self.flat(scores, "logits" if len(parts) == 1 else f"logits_{i}"))
        return outputs

    @staticmethod
    def states(config: ModelConfig, slots: int) -> dict[str, tuple[int, ...]]:
        return {"kv_cache": (2 * config.num_layers, config.num_kv_heads, slots, config.head_dim)}

    def place(self, layer: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("kv_cache", layer), ("kv_cache", self.config.num_layers + layer)


def _name(dtype: type[np.floating]) -> str:
    return "fp16" if dtype is np.float16 else "fp32"


def build_program(
    weights: CoreMlWeights,
    layout: type[CoreMlPass],
    config: ModelConfig,
    shape: StaticShape,
    hidden: bool,
    on_function: Callable[[float], None],
) -> Program:
    """Build a program that no coremltools pass changes. hidden: as in `outputs`."""
    program = Program()
    wanted = functions()
    dtype = types.fp16 if weights.dtype is np.float16 else types.fp32
    for i, (name, rows, scores) in enumerate(wanted):
        inputs = {
            "input_ids": ops.placeholder((1, rows), dtype=types.int32),
            "position_ids": ops.placeholder((rows,), dtype=types.int32),
            "write_slot": ops.placeholder((1,), dtype=types.int32),
            "mask": ops.placeholder((1, 1, rows, shape.slots), dtype=dtype),
        }
        states = {
            name: ops.state_tensor_placeholder(size, dtype=dtype)
            for name, size in layout.states(config, shape.slots).items()
        }
        with Function({**inputs, **states}, opset_version=ct.target.iOS18) as function:
            run = layout(weights, config, shape, rows, function.inputs)
            function.set_outputs(run.outputs(scores, hidden))
        program.add_function(name, function)
        on_function((i + 1) / len(wanted))
    program.default_function_name = wanted[0].name
    program.export_as_multifunction = True
    program.skip_all_passes = True
    return program
