"""Norm, rotation and attention as composites: private graphs, named as in Apple's coreai-torch, for
which a device's compiler may take operations of its own. Core AI on Linux computes the graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
from coreai import authoring as ops
from coreai.authoring import TensorSpec, Value

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.coreai.private import composite_declaration
from edge_spec.exporters.requests import MASKED

_Shape = tuple[int, ...]
_HEAD_AXIS = np.array(3, np.int32)


class Composites:
    """The composites of one function; make it before the function's own graph.

    norms, rotations: by the shape that they take and return.
    """

    norms: Mapping[_Shape, Callable[[Value, Value], Value]]
    rotations: Mapping[_Shape, Callable[[Value, Value, Value], Value]]
    attend: Callable[[Value, Value, Value, Value], Value]

    def __init__(self, config: ModelConfig, rows: int, slots: int) -> None:
        kv_heads, head_dim = config.num_kv_heads, config.head_dim
        # A dict drops the second of equal shapes.
        heads = dict.fromkeys((1, count, rows, head_dim) for count in (config.num_heads, kv_heads))
        normed = [(1, rows, config.hidden_size), *(heads if config.qk_norm else ())]
        self.norms = {shape: _norm(shape, config.norm_epsilon) for shape in normed}
        self.rotations = {shape: _rotation(shape) for shape in heads}
        # Query heads that share keys are extra rows of one head, so that no key is repeated.
        per_head = (config.num_heads // kv_heads) * rows
        self.attend = _attention((1, kv_heads, per_head, head_dim), slots)


def _norm(shape: _Shape, epsilon: float) -> Callable[[Value, Value], Value]:
    def rms_norm(input: Value, scale: Value) -> Value:
        mean = ops.reduce_mean(ops.mul(input, input), np.array([-1], np.int32))
        root = ops.rsqrt(ops.broadcasting_add(mean, np.array(epsilon, np.float32)))
        return ops.broadcasting_mul(ops.broadcasting_mul(input, root), scale)

    shapes = {"input": shape, "scale": shape[-1:]}
    return _add_composite("rms_norm", rms_norm, shapes, {"axes": -1, "eps": epsilon})


def _rotation(shape: _Shape) -> Callable[[Value, Value, Value], Value]:
    """Rotate heads, pairing halves (Su et al. 2021)."""
    half = shape[-1] // 2

    def rope(input: Value, cos: Value, sin: Value) -> Value:
        first, second = ops.split(input, np.array([half, half], np.uint32), _HEAD_AXIS)
        turned = [
            ops.sub(ops.broadcasting_mul(first, cos), ops.broadcasting_mul(second, sin)),
            ops.add(ops.broadcasting_mul(second, cos), ops.broadcasting_mul(first, sin)),
        ]
        return ops.concat(_HEAD_AXIS, turned)

    table = (1, 1, shape[2], half)
    attributes = {"base": 1e4, "interleaved": False, "scale": 1.0}  # base: unused beside tables
    return _add_composite("rope", rope, {"input": shape, "cos": table, "sin": table}, attributes)


def _attention(queries: _Shape, slots: int) -> Callable[[Value, Value, Value, Value], Value]:
    scale = queries[-1] ** -0.5
    keys = (*queries[:2], slots, queries[-1])

    def attention(query: Value, key: Value, value: Value, attn_mask: Value) -> Value:
        scaled = ops.broadcasting_mul(query, np.array(scale, np.float32))
        turned = ops.transpose(key, np.array([0, 1, 3, 2], np.uint32))
        products = ops.broadcasting_batch_matmul(scaled, turned)
        unseen = ops.broadcasting_sub(np.array(1, np.float32), ops.cast(attn_mask, np.float32))
        bias = ops.broadcasting_mul(unseen, np.array(MASKED, np.float32))
        shares = ops.softmax(ops.broadcasting_add(products, bias), _HEAD_AXIS)
        return ops.broadcasting_batch_matmul(shares, value)

    shapes = {"query": queries, "key": keys, "value": keys}
    shapes["attn_mask"] = (1, 1, queries[2], slots)
    attributes = {"is_causal": False, "scale": scale, "window_size": 0}
    return _add_composite("scaled_dot_product_attention", attention, shapes, attributes)


def _add_composite(
    name: str,
    body: Callable[..., Value],
    shapes: Mapping[str, _Shape],
    attributes: Mapping[str, bool | int | float],
) -> Callable[..., Value]:
    """Add a composite to the module. shapes: of the body's arguments, whose first one has the
    result's."""
    returned = next(iter(shapes.values()))
    kinds = {each: np.bool_ if each == "attn_mask" else np.float32 for each in shapes}
    # The library reads a graph's signature from the annotations of its Python function.
    body.__annotations__ = {
        each: Annotated[Value, TensorSpec(shape, kinds[each])] for each, shape in shapes.items()
    }
    output = TensorSpec(returned, np.float32, name="output")
    body.__annotations__["return"] = Annotated[Value, output]
    graph: Any = ops.graph(
        body,
        private=True,
        no_inline=True,
        provided_name="_".join(map(str, (name, *returned))),
        composite_decl=composite_declaration(name, shapes, attributes),
    )
    return lambda *values: graph(*values)[0]
