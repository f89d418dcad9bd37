"""Writes the static layout (exporters/static_layout.py) as functions of a Core ML program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as ops  # noqa: N813
from coremltools.converters.mil import Function, Program
from coremltools.converters.mil.mil import types

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.coreml.recipes import Recipe
from edge_spec.exporters.coreml.weights import CoreMlWeights, Var, constant
from edge_spec.exporters.static_layout import StaticShape, functions


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
