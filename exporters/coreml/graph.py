"""Writes the static layout (exporters/requests.py) as functions of a Core ML program.

There are two ways to lay a transformer out for Core ML: for the GPU and for the Neural Engine.

They differ where the published recipes do. GPU: Apple's Llama 3.1 recipe ("On Device Llama 3.1
with Core ML", 2024): linear layers, fused attention, keys and values in a state each. Neural
Engine: Apple's "Deploying Transformers on the Apple Neural Engine" (2022) and ANEMLL 0.3.4: rows
last, 1x1 convolutions, explicit attention, normalization as a layer norm of [x, -x], the head in
parts, one state.

Recipes add operations to the function that is being built. x is a residual stream of `rows` rows in
the recipe's own layout; heads are [1, heads, rows, head_dim] in both, and keys and values of all
slots [1, kv_heads, slots, head_dim]. `logits` are outputs [rows, part] that are the vocabulary side
by side, `place` is the state and the index in it of a layer's keys and of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as ops  # noqa: N813
from coremltools.converters.mil import Function, Program
from coremltools.converters.mil.mil import types

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.coreml.weights import CoreMlWeights, Var, constant
from edge_spec.exporters.requests import StaticShape, functions

ANE_MAX_SIZE = 16384  # of a dimension on the Neural Engine: a longer one leaves it


class GpuRecipe:
    """x: [1, rows, hidden_size]."""

    def __init__(self, weights: CoreMlWeights, config: ModelConfig) -> None:
        self._weights = weights
        self._config = config

    def embed(self, ids: Var, rows: int) -> Var:
        table = self._weights.head("model.embed_tokens.weight", slice(0, self._config.vocab_size))
        return ops.gather(x=table, indices=ids, axis=0)

    def norm(self, x: Var, name: str) -> Var:
        """Computes in float32: squares of large activations leave float16."""
        wide = ops.cast(x=x, dtype="fp32")
        mean = ops.reduce_mean(x=ops.mul(x=wide, y=wide), axes=[-1], keep_dims=True)
        scale = ops.rsqrt(x=mean, epsilon=np.float32(self._config.norm_epsilon))
        normed = ops.mul(x=wide, y=scale)
        if self._weights.dtype is np.float16:
            normed = ops.cast(x=normed, dtype="fp16")
        return ops.mul(x=normed, y=self._weights.vector(name))

    def linear(self, x: Var, name: str, bias: str | None) -> Var:
        return self._linear(x, name, self._weights.matrix(name), bias)

    def _linear(self, x: Var, name: str, weight: Var, bias: str | None = None) -> Var:
        if bias is None:
            added = self._weights.zeros(name, weight.shape[0])
        else:
            added = self._weights.vector(bias)
        return ops.linear(x=x, weight=weight, bias=added)

    def split_heads(self, x: Var, num_heads: int, rows: int) -> Var:
        split = ops.reshape(x=x, shape=(1, rows, num_heads, self._config.head_dim))
        return ops.transpose(x=split, perm=[0, 2, 1, 3])

    def norm_heads(self, x: Var, name: str) -> Var:
        return self.norm(x, name)

    def join_heads(self, x: Var, rows: int) -> Var:
        joined = ops.transpose(x=x, perm=[0, 2, 1, 3])
        return ops.reshape(x=joined, shape=(1, rows, self._config.query_size))

    def attend(self, queries: Var, keys: Var, values: Var, mask: Var) -> Var:
        return ops.scaled_dot_product_attention(
            query=queries, key=keys, value=values, attn_mask=mask
        )

    def flat(self, x: Var, rows: int, name: str) -> Var:
        return ops.reshape(x=x, shape=(rows, self._config.hidden_size), name=name)

    def logits(self, x: Var, name: str, rows: int) -> list[Var]:
        head = self._weights.head(name, slice(0, self._config.vocab_size))
        scores = self._linear(x, name, head)
        return [ops.reshape(x=scores, shape=(rows, self._config.vocab_size), name="logits")]

    def states(self, slots: int) -> dict[str, tuple[int, ...]]:
        config = self._config
        shape = (config.num_layers, config.num_kv_heads, slots, config.head_dim)
        return {"keys": shape, "values": shape}

    def place(self, layer: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("keys", layer), ("values", layer)


class AneRecipe:
    """x: [1, hidden_size, 1, rows]."""

    def __init__(self, weights: CoreMlWeights, config: ModelConfig) -> None:
        self._weights = weights
        self._config = config
        parts = -(-config.vocab_size // ANE_MAX_SIZE)
        borders = np.linspace(0, config.vocab_size, parts + 1).astype(int).tolist()
        self._parts = [slice(*ends) for ends in pairwise(borders)]

    def embed(self, ids: Var, rows: int) -> Var:
        """Gathers from the head's parts, so that tied weights are stored once: each gives its own
        rows and zeros for the others."""
        found: Any = None
        for part in self._parts:
            table = self._weights.head("model.embed_tokens.weight", part, 2)
            local = ops.sub(x=ids, y=np.int32(part.start))
            last = np.int32(part.stop - part.start - 1)
            inside = ops.minimum(x=ops.maximum(x=local, y=np.int32(0)), y=last)
            here = ops.cast(x=ops.equal(x=local, y=inside), dtype=_name(self._weights.dtype))
            picked = ops.reshape(
                x=ops.gather(x=table, indices=inside, axis=0),
                shape=(1, rows, self._config.hidden_size),
            )
            picked = ops.mul(x=picked, y=ops.reshape(x=here, shape=(1, rows, 1)))
            found = picked if found is None else ops.add(x=found, y=picked)
        return ops.expand_dims(x=ops.transpose(x=found, perm=[0, 2, 1]), axes=[2])

    def norm(self, x: Var, name: str) -> Var:
        return self._norm(x, name, axis=1, shape=(1, -1, 1, 1))

    def norm_heads(self, x: Var, name: str) -> Var:
        return self._norm(x, name, axis=3, shape=(1, 1, 1, -1))

    def _norm(self, x: Var, name: str, axis: int, shape: tuple[int, ...]) -> Var:
        """The mean of [x, -x] is 0, so that its layer norm is a root mean square norm of x, which
        the Neural Engine computes in one operation with wide sums."""
        size = x.shape[axis]
        both = ops.concat(values=[x, ops.mul(x=x, y=self._weights.dtype(-1))], axis=axis)
        epsilon = self._weights.dtype(self._config.norm_epsilon)
        normed = ops.layer_norm(x=both, axes=[axis], epsilon=epsilon)
        end = [size if i == axis else length for i, length in enumerate(x.shape)]
        half = ops.slice_by_index(x=normed, begin=[0, 0, 0, 0], end=end)
        return ops.mul(x=half, y=ops.reshape(x=self._weights.vector(name), shape=shape))

    def linear(self, x: Var, name: str, bias: str | None) -> Var:
        added = {} if bias is None else {"bias": self._weights.vector(bias)}
        return ops.conv(x=x, weight=self._weights.matrix(name, 2), **added)

    def split_heads(self, x: Var, num_heads: int, rows: int) -> Var:
        split = ops.reshape(x=x, shape=(1, num_heads, self._config.head_dim, rows))
        return ops.transpose(x=split, perm=[0, 1, 3, 2])

    def join_heads(self, x: Var, rows: int) -> Var:
        joined = ops.transpose(x=x, perm=[0, 1, 3, 2])
        return ops.reshape(x=joined, shape=(1, self._config.query_size, 1, rows))

    def attend(self, queries: Var, keys: Var, values: Var, mask: Var) -> Var:
        scale = self._weights.dtype(self._config.head_dim**-0.5)
        scaled = ops.mul(x=queries, y=scale)  # first: products then stay within float16
        scores = ops.add(x=ops.matmul(x=scaled, y=keys, transpose_y=True), y=mask)
        return ops.matmul(x=ops.softmax(x=scores, axis=-1), y=values)

    def flat(self, x: Var, rows: int, name: str) -> Var:
        return self._rows_first(x, name)

    def _rows_first(self, x: Var, name: str) -> Var:
        """[1, size, 1, rows] -> [rows, size], called `name`."""
        return ops.transpose(x=ops.squeeze(x=x, axes=[0, 2]), perm=[1, 0], name=name)

    def logits(self, x: Var, name: str, rows: int) -> list[Var]:
        outputs = []
        for i, part in enumerate(self._parts):
            scores = ops.conv(x=x, weight=self._weights.head(name, part, 2))
            output = "logits" if len(self._parts) == 1 else f"logits_{i}"
            outputs.append(self._rows_first(scores, output))
        return outputs

    def states(self, slots: int) -> dict[str, tuple[int, ...]]:
        config = self._config
        return {"kv_cache": (2 * config.num_layers, config.num_kv_heads, slots, config.head_dim)}

    def place(self, layer: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("kv_cache", layer), ("kv_cache", self._config.num_layers + layer)


Recipe = GpuRecipe | AneRecipe


def _name(dtype: type[np.floating]) -> str:
    return "fp16" if dtype is np.float16 else "fp32"


@dataclass(frozen=True, eq=False)
class ProgramBuilder:
    weights: CoreMlWeights
    recipe: Recipe
    config: ModelConfig
    shape: StaticShape
    hidden: bool  # whether functions that score return the hidden states, too

    def build(self, on_function: Callable[[float], None]) -> Program:
        """A program that is saved as it is: no pass of coremltools changes it."""
        program = Program()
        wanted = functions()
        for i, (name, rows, scores) in enumerate(wanted):
            program.add_function(name, self._function(rows, scores))
            on_function((i + 1) / len(wanted))
        program.default_function_name = wanted[0].name
        program.export_as_multifunction = True
        program.skip_all_passes = True
        return program

    def _function(self, rows: int, scores: bool) -> Function:
        dtype = types.fp16 if self.weights.dtype is np.float16 else types.fp32
        inputs = {
            "input_ids": ops.placeholder((1, rows), dtype=types.int32),
            "position_ids": ops.placeholder((rows,), dtype=types.int32),
            "write_slot": ops.placeholder((1,), dtype=types.int32),
            "mask": ops.placeholder((1, 1, rows, self.shape.slots), dtype=dtype),
        }
        states = {
            name: ops.state_tensor_placeholder(shape, dtype=dtype)
            for name, shape in self.recipe.states(self.shape.slots).items()
        }
        with Function({**inputs, **states}, opset_version=ct.target.iOS18) as function:
            function.set_outputs(_Pass(self, rows, function.inputs).outputs(scores))
        return function


class _Pass:
    """One function while it is built."""

    def __init__(self, graph: ProgramBuilder, rows: int, inputs: dict[str, Var]) -> None:
        self._graph = graph
        self._recipe = graph.recipe
        self._config = config = graph.config
        self._rows = rows
        self._inputs = inputs
        names = self._recipe.states(graph.shape.slots)
        self._cache = {name: ops.read_state(input=inputs[name]) for name in names}
        write_slot = inputs["write_slot"]
        self._begin = [write_slot, np.array([0], np.int32)]
        self._end = [
            ops.add(x=write_slot, y=np.array([rows], np.int32)),
            np.array([config.head_dim], np.int32),
        ]
        self._cos, self._sin = self._rotations()
        groups = config.num_heads // config.num_kv_heads
        self._mask = ops.tile(x=inputs["mask"], reps=[1, 1, groups, 1])  # for each query of a group

    def outputs(self, scores: bool) -> list[Var]:
        config, recipe = self._config, self._recipe
        x = recipe.embed(self._inputs["input_ids"], self._rows)
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = recipe.norm(x, prefix + "input_layernorm.weight")
            x = ops.add(x=x, y=self._attention(normed, layer, prefix + "self_attn."))
            normed = recipe.norm(x, prefix + "post_attention_layernorm.weight")
            x = ops.add(x=x, y=self._mlp(normed, prefix + "mlp."))
        x = recipe.norm(x, "model.norm.weight")
        outputs = []
        if scores:
            head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
            outputs = recipe.logits(x, head, self._rows)
        if self._graph.hidden or not scores:
            outputs.append(recipe.flat(x, self._rows, "hidden"))
        return outputs

    def _rotations(self) -> tuple[Var, Var]:
        """cos and sin of the rows' positions, [1, 1, rows, head_dim / 2]."""
        graph, found = self._graph, []
        tables = self._config.rotations[0].tables(graph.shape.context_length)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            stored = constant(name, table.astype(graph.weights.dtype))
            picked = ops.gather(x=stored, indices=self._inputs["position_ids"], axis=0)
            found.append(ops.expand_dims(x=picked, axes=[0, 1]))
        return found[0], found[1]

    def _attention(self, x: Var, layer: int, prefix: str) -> Var:
        config, recipe = self._config, self._recipe

        def heads(part: str, count: int) -> Var:
            name = f"{prefix}{part}_proj"
            bias = name + ".bias" if config.qkv_bias else None
            split = recipe.split_heads(recipe.linear(x, name + ".weight", bias), count, self._rows)
            if config.qk_norm and part in "qk":
                split = recipe.norm_heads(split, f"{prefix}{part}_norm.weight")
            return split if part == "v" else self._rotate(split)

        key_place, value_place = recipe.place(layer)
        keys = self._write(key_place, heads("k", config.num_kv_heads))
        values = self._write(value_place, heads("v", config.num_kv_heads))
        # Query heads that share keys stand as further rows of one head: nothing is repeated.
        per_head = (config.num_heads // config.num_kv_heads) * self._rows
        shape = (1, config.num_kv_heads, per_head, config.head_dim)
        queries = ops.reshape(x=heads("q", config.num_heads), shape=shape)
        mixed = recipe.attend(queries, keys, values, self._mask)
        each = ops.reshape(x=mixed, shape=(1, config.num_heads, self._rows, config.head_dim))
        bias = prefix + "o_proj.bias" if config.output_bias else None
        return recipe.linear(recipe.join_heads(each, self._rows), prefix + "o_proj.weight", bias)

    def _rotate(self, x: Var) -> Var:
        """x: [1, heads, rows, head_dim], halves paired (Su et al. 2021)."""
        first, second = ops.split(x=x, num_splits=2, axis=-1)
        cos, sin = self._cos, self._sin
        turned = [
            ops.sub(x=ops.mul(x=first, y=cos), y=ops.mul(x=second, y=sin)),
            ops.add(x=ops.mul(x=second, y=cos), y=ops.mul(x=first, y=sin)),
        ]
        return ops.concat(values=turned, axis=-1)

    def _write(self, place: tuple[str, int], new: Var) -> Var:
        """Puts `new` [1, kv_heads, rows, head_dim] into a state; [1, kv_heads, slots, head_dim]."""
        name, index = place
        kv_heads = self._config.num_kv_heads
        updated = ops.slice_update(
            x=self._cache[name],
            update=new,
            begin=ops.concat(values=[np.array([index, 0], np.int32), *self._begin], axis=0),
            end=ops.concat(values=[np.array([index + 1, kv_heads], np.int32), *self._end], axis=0),
        )
        cache = ops.coreml_update_state(state=self._inputs[name], value=updated)
        self._cache[name] = cache
        end = [index + 1, kv_heads, self._graph.shape.slots, self._config.head_dim]
        return ops.slice_by_index(x=cache, begin=[index, 0, 0, 0], end=end)

    def _mlp(self, x: Var, prefix: str) -> Var:
        recipe = self._recipe
        gate = recipe.linear(x, prefix + "gate_proj.weight", None)
        up = recipe.linear(x, prefix + "up_proj.weight", None)
        product = ops.mul(x=ops.silu(x=gate), y=up)
        return recipe.linear(product, prefix + "down_proj.weight", None)
