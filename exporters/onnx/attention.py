"""Attention and convolutions of decoder layers, for onnxruntime.

GroupQueryAttention rearranges all cached keys and values in every pass, once per query head; in
long texts that costs more than the attention. So passes of few rows stack the query heads that
share keys as rows of one matrix, [group * rows, head_dim] per key head. The keys are the *left*
factor and are read in place; values are rearranged once per key head.

A single row then runs in the same kernel as wider passes: its result is bit-identical, and no row
is attended twice. The cache may be longer than the text, since masked slots add zero. Prompts use
GroupQueryAttention; their stacked scores would take hundreds of megabytes.

A gated short convolution (LFM2) caches its inputs for every token, like keys, so that trees,
commits and rollbacks need nothing else. Terms are added in a fixed order: a row's bits do not
depend on the number of rows. A graph is repeated between `attention_rows` and `kept_rows` for
conversations that share a pass (runtimes/ort/joint_graph.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Rotation
from edge_spec.exporters.onnx.emitter import Emitter, distances, window_bias
from edge_spec.exporters.onnx.nodes import CONTRIB, tensor

STACKED = "stacked"
SCATTER_OPSET = 24  # TensorScatter
_MIN_KV_SIZE = 256  # below, GroupQueryAttention is as fast, with 1 node instead of 17
PARTS = ("key", "value")
_Form = Callable[[Emitter, str, int, str], list[str]]


def pays_to_stack(config: ModelConfig) -> bool:
    """Return whether the graph gets both forms: query heads share large keys, and the model has
    only Llama's features."""
    shares_large = config.num_heads > config.num_kv_heads and config.kv_size >= _MIN_KV_SIZE
    return shares_large and not config.features()


def stacked_inputs() -> list[ValueInfoProto]:
    """In a stacked pass, `attention_bias` is [1, 1, rows, capacity], -inf beyond its own rows as
    well, and `position_ids` has one per row. The other form's inputs are ignored."""
    return [
        tensor(STACKED, TensorProto.BOOL, [1]),  # the form of this pass
        tensor("cached_tokens", TensorProto.INT64, [1]),  # first slot to write in a stacked pass
    ]


class AttentionGraph(Emitter):
    """A graph to which attention and convolutions are added."""

    _rotations: Mapping[Rotation, Sequence[str]]  # names of tables
    _biases: Mapping[int | None, str]  # added to scores, by window
    _ancestors: Sequence[str]  # `ancestors` split, each [attended]

    def prepare_attention(self) -> None:
        config = self.config
        rotations = enumerate(config.rotations)
        self._rotations = {each: self._rope_tables(i, each) for i, each in rotations}
        every = "attention_bias" if config.relative_positions is None else self._add_relative_bias()
        self._biases = {None: every} | {
            window: window_bias(self, window) for window in config.windows
        }
        self._ancestors = self._nearest_first() if config.convolving else []

    def _rope_tables(self, index: int, rotation: Rotation) -> list[str]:
        tables = rotation.tables(self.config.context_length)
        suffix = f".{index}" if index else ""
        return [
            self.weights.add(f"rope_{name}{suffix}", table)
            for name, table in zip(("cos", "sin"), tables, strict=True)
        ]

    def attend(self, x: str, layer: int) -> str:
        config, is_stacked = self.config, pays_to_stack(self.config)
        prefix = f"model.layers.{layer}.self_attn."
        own = [f"{part}_proj" for part in self._parts(layer)]
        packed = self.linear(x, prefix, own, config.qkv_bias)
        if config.qk_norm and is_stacked:
            parts = self._normed_heads(packed, layer, prefix)
            packed = self.add("Concat", parts, prefix + "normed", axis=-1)
        if is_stacked:
            outputs = [prefix + "output", *(f"present.{layer}.{part}" for part in PARTS)]
            output = self.choose(
                STACKED,
                outputs,
                self._branch("stacked", self._stacked, packed, layer),
                self._branch("grouped", self._grouped, packed, layer),
            )
        else:
            output, *_ = self._grouped(self, packed, layer, "")
        return self.linear(output, prefix, ["o_proj"], config.output_bias)

    def _branch(self, name: str, form: _Form, packed: str, layer: int) -> GraphProto:
        """Build a form of attention; its name ends those of its nodes."""
        inner = self.branch()
        found = form(inner, packed, layer, f".{name}")
        return inner.subgraph(f"model.layers.{layer}.self_attn.output.{name}", found)

    def _stacked(self, graph: Emitter, packed: str, layer: int, end: str) -> list[str]:
        """packed: [1, rows, q, k and v]."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads

        def add(op: str, inputs: list[str], name: str, domain: str = "", **attributes: Any) -> str:
            return graph.add(op, inputs, f"{packed}.{name}{end}", domain, **attributes)

        def reshaped(x: str, name: str, shape: list[int]) -> str:
            return graph.reshape(x, f"{name}_shape", shape, f"{packed}.{name}{end}")

        def split(x: str, sizes: list[int], names: list[str]) -> list[str]:
            parts = [f"{packed}.{name}{end}" for name in names]
            graph.add(
                "Split", [x, graph.constant(f"{'_'.join(names)}_sizes", sizes)], parts, axis=1
            )
            return parts

        split_size = graph.constant("head_shape", [1, 0, -1, config.head_dim])
        by_row = add("Reshape", [packed, split_size], "by_row")
        by_head = add("Transpose", [by_row], "by_head", perm=[0, 2, 1, 3])
        turning, value = split(by_head, [heads + kv_heads, kv_heads], ["turning", "value"])
        rotation = ["position_ids", "rope_cos", "rope_sin"]
        turned = add("RotaryEmbedding", [turning, *rotation], "turned", CONTRIB)
        query, key = split(turned, [heads, kv_heads], ["query", "key"])
        keys, values = (
            graph.add(
                "TensorScatter",
                [f"past.{layer}.{part}", rows, "cached_tokens"],
                f"present.{layer}.{part}{end}",
                axis=2,
            )
            for part, rows in zip(PARTS, (key, value), strict=True)
        )
        # A group's heads are adjacent, so stacking moves nothing.
        stacked = reshaped(query, "stacked_query", [1, kv_heads, -1, config.head_dim])
        scale = config.head_dim**-0.5
        columns = add("FusedMatMul", [keys, stacked], "columns", CONTRIB, transB=1, alpha=scale)
        scores = add("Transpose", [columns], "scores", perm=[0, 1, 3, 2])
        by_query = reshaped(scores, "head_scores", [1, heads, -1, 0])
        masked = add("Add", [by_query, "attention_bias"], "m")
        weights = add("Softmax", [masked], "weights", axis=-1)
        grouped = reshaped(weights, "group_weights", [1, kv_heads, -1, 0])
        mixed = add("MatMul", [grouped, values], "mix")
        apart = reshaped(mixed, "head_mix", [1, heads, -1, config.head_dim])
        rows = add("Transpose", [apart], "row_mix", perm=[0, 2, 1, 3])
        return [reshaped(rows, "output", [1, 0, -1]), keys, values]

    def _parts(self, layer: int) -> str:
        """Return which of "qkv" have matrices in this layer."""
        config = self.config
        if config.kv_source(layer) != layer:
            return "q"
        return "qk" if config.kind(layer).keys_as_values else "qkv"

    def _grouped(self, graph: Emitter, packed: str, layer: int, end: str) -> list[str]:
        """Add GroupQueryAttention; `end` ends the names of its outputs. A layer that reads another
        layer's keys and values uses that one's outputs and adds none."""
        config, kind = self.config, self.config.kind(layer)
        source, heads = config.kv_source(layer), config.heads(layer)
        prefix = f"model.layers.{layer}.self_attn."
        attended = graph.add("Gather", [packed, "attention_rows"], prefix + "attended", axis=1)
        inputs = [attended, "", ""]
        if (config.qk_norm or self._parts(layer) != "qkv") and not pays_to_stack(config):
            inputs = self._normed_heads(inputs[0], layer, prefix)
        rotation, rotary = ["", "", ""], config.rotation(kind)
        if rotary is not None and not config.qk_norm_after_rope:
            rotation = [*self._rotations[rotary], "position_ids"]
        caches = [f"present.{layer}.{part}{end}" for part in PARTS]
        past = [f"past.{layer}.{part}" for part in PARTS]
        if source != layer:
            caches, past = [], [f"present.{source}.{part}" for part in PARTS]
        sinks = [graph.vector(prefix + "sinks")] if config.attention_sinks else []
        # Only where they differ from the operator's defaults.
        stated = {"scale": config.attention_scale, "softcap": config.attention_softcap}
        lengths = ["seqlens_k", "total_sequence_length"]
        mixed = graph.add(
            "GroupQueryAttention",
            [*inputs, *past, *lengths, *rotation, self._biases[kind.window], *sinks],
            [prefix + "mixed", *caches],
            domain=CONTRIB,
            num_heads=heads.num_heads,
            kv_num_heads=heads.num_kv_heads,
            do_rotary=int(rotation[0] != ""),
            **{name: value for name, value in stated.items() if value is not None},
        )
        output = graph.add("Gather", [mixed, "kept_rows"], f"{prefix}output{end}", axis=1)
        return [output, *caches]

    def _normed_heads(self, packed: str, layer: int, prefix: str) -> list[str]:
        """Split q, k and v and normalize them; some models rotate q and k first."""
        config = self.config
        parts = self._split(packed, layer, prefix)
        for part in "qk" if config.qk_norm else "":
            if part not in parts:
                continue
            name = f"{prefix}{part}"
            if config.qk_norm_after_rope:
                parts[part] = self._rotated(parts[part], layer, name)
            if config.qk_norm_whole:
                parts[part] = self.norm(parts[part], name + "_norm", name + ".normed")
            else:
                parts[part] = self._norm_each_head(parts[part], layer, name)
        if "v" in parts:
            if config.value_norm:
                parts["v"] = self._norm_each_head(parts["v"], layer, f"{prefix}v")
            return list(parts.values())
        kv_size = config.heads(layer).kv_size
        none = self.weights.add(f"no_keys_{kv_size}", np.zeros((1, 0, kv_size), np.float32))
        return [parts["q"], none, none]

    def _split(self, packed: str, layer: int, prefix: str) -> dict[str, str]:
        heads, parts = self.config.heads(layer), self._parts(layer)
        if parts == "q":
            return {"q": packed}
        sizes = [heads.query_size if part == "q" else heads.kv_size for part in parts]
        name = self._sized("qkv_sizes", layer) + ("" if parts == "qkv" else f".{parts}")
        split = {part: f"{prefix}{part}.split" for part in parts}
        self.add("Split", [packed, self.constant(name, sizes)], list(split.values()), axis=-1)
        return split if "v" in split else split | {"v": split["k"]}

    def _sized(self, name: str, layer: int) -> str:
        kind = self.config.kind(layer)
        own = [kind.num_kv_heads, kind.head_dim]
        return name if own == [None, None] else f"{name}.{own[0]}.{own[1]}"

    def _rotated(self, x: str, layer: int, name: str) -> str:
        rotation = self.config.rotation(self.config.kind(layer))
        if rotation is None:
            return x
        inputs = [x, "position_ids", *self._rotations[rotation]]
        return self.add("RotaryEmbedding", inputs, name + ".rotated", domain=CONTRIB)

    def _norm_each_head(self, x: str, layer: int, name: str) -> str:
        head_dim = self.config.heads(layer).head_dim
        heads = self.constant(self._sized("head_shape", layer), [1, 0, -1, head_dim])
        flat = self.constant("flat_shape", [1, 0, -1])
        split = self.add("Reshape", [x, heads], name + ".heads")
        if name.endswith(".v"):
            ones = self.weights.add(f"ones_{head_dim}", np.ones(head_dim, np.float32))
            normed = self.rms_norm(split, ones, self.config.norm_epsilon, name + ".normed")
        else:
            normed = self.norm(split, name + "_norm", name + ".normed")
        return self.add("Reshape", [normed, flat], name + ".flat")

    def _add_relative_bias(self) -> str:
        """Return `attention_bias` plus each head's relative bias, [1, heads, attended, total]. In a
        tree, distances are along the path."""
        relative = self.config.relative_positions
        assert relative is not None
        weight = self.checkpoint.float32("model.relative_bias.weight")
        distance = distances(self, "relative.")
        far = self.constant("relative.far", relative.max_distance, np.int32)
        after = self.add("Sub", [far, distance], "relative.after")
        bias = self.head_bias("relative.", after, weight[relative.buckets(both_ways=False)])
        return self.add("Add", [bias, "attention_bias"], "relative.bias")

    def head_bias(self, prefix: str, after: str, table: np.ndarray) -> str:
        """Return [1, heads, rows, keys], rows of `table` [2 * max_distance + 1, heads].

        after: name of [rows, keys] int32, each key's position minus its query's, plus max_distance.
        """
        lowest = self.constant(prefix + "nearest", 0, np.int32)
        highest = self.constant(prefix + "farthest", len(table) - 1, np.int32)
        index = self.add("Clip", [after, lowest, highest], prefix + "index")
        stored = self.weights.add(prefix + "table", table.astype(np.float32))
        found = self.add("Gather", [stored, index], prefix + "found", axis=0)
        heads = self.add("Transpose", [found], prefix + "heads", perm=[2, 0, 1])
        return self.add("Unsqueeze", [heads, self.constant("first_axis", [0])], prefix + "by_head")

    def attend_to_source(self, x: str, layer: int) -> str:
        """Attend to the source; a single row is attended twice here as well (graph.py)."""
        config, prefix = self.config, f"model.layers.{layer}.cross_attn."
        queries = self.linear(x, prefix, ["q_proj"], config.qkv_bias)
        attended = self.add("Gather", [queries, "attention_rows"], prefix + "attended", axis=1)
        source = [f"cross.{layer}.{part}" for part in PARTS]
        mixed = self.attend_everywhere([attended, *source], prefix + "mixed")
        output = self.add("Gather", [mixed, "kept_rows"], prefix + "output", axis=1)
        return self.linear(output, prefix, ["o_proj"], config.output_bias)

    def attend_everywhere(self, inputs: list[str], output: str) -> str:
        """Attention in which each row sees all keys."""
        config = self.config
        scale = config.attention_scale
        return self.add(
            "MultiHeadAttention",
            inputs,
            output,
            domain=CONTRIB,
            num_heads=config.num_heads,
            scale=float(config.head_dim) ** -0.5 if scale is None else scale,
        )

    def _nearest_first(self) -> list[str]:
        count = self.config.num_preceding
        ones = self.weights.add("one_each", np.ones(count, np.int64))
        found = [f"{ANCESTORS}.{distance}" for distance in range(count)]
        self.add("Split", [ANCESTORS, ones], found, axis=0)
        first = self.constant("first_axis", [0])
        return [self.add("Squeeze", [name, first], name + ".rows") for name in found]

    def convolve(self, x: str, layer: int) -> str:
        prefix = f"model.layers.{layer}.conv."
        joined = self.linear(x, prefix, ["in_proj"])
        parts = [prefix + part for part in ("enters", "leaves", "values")]
        self.add("Split", [joined], parts, axis=-1, num_outputs=3)
        gated = self.product(parts[0], parts[2], prefix + "gated")
        attended = self.add("Gather", [gated, "attention_rows"], prefix + "attended", axis=1)
        convolved = self._convolved(attended, layer)
        kept = self.add("Gather", [convolved, "kept_rows"], prefix + "kept", axis=1)
        product = self.product(parts[1], kept, prefix + "product")
        return self.linear(product, prefix, ["out_proj"])

    def _convolved(self, rows: str, layer: int) -> str:
        """Convolve rows [1, attended, hidden] and write them to the cache."""
        prefix, first = f"model.layers.{layer}.conv.", self.constant("first_axis", [0])
        update = self.add("Unsqueeze", [rows, first], prefix + "update")
        cache = [f"past.{layer}.gated", update, "cached_tokens"]
        present = self.add("TensorScatter", cache, f"present.{layer}.gated", axis=2)
        kernel = self.checkpoint.float32(prefix + "conv.weight").T  # the row's own tap last
        taps = [
            self.weights.add(f"{prefix}tap.{distance}", np.ascontiguousarray(tap))
            for distance, tap in enumerate(kernel[::-1])
        ]
        total = self.product(update, taps[0], prefix + "own")
        for distance, tap in enumerate(taps[1:], start=1):
            name = f"{prefix}before.{distance}"
            ancestors = self._ancestors[distance - 1]
            before = self.add("Gather", [present, ancestors], name, axis=2)
            term = self.product(before, tap, name + ".term")
            total = self.plus(total, term, name + ".total")
        return self.add("Squeeze", [total, first], prefix + "convolved")


def source_values(config: ModelConfig) -> list[ValueInfoProto]:
    """Return a source's keys and values, outputs of the encoder and inputs of the decoder."""
    shape: list[int | str] = [1, config.num_heads, "source", config.head_dim]
    return [
        tensor(f"cross.{layer}.{part}", TensorProto.FLOAT, shape)
        for layer in range(config.num_layers)
        for part in PARTS
    ]


ANCESTORS = "ancestors"


def convolution_inputs(config: ModelConfig) -> list[ValueInfoProto]:
    """The last slot of a convolution's cache is never written: -1 reads its zeros."""
    return [
        tensor("cached_tokens", TensorProto.INT64, [1]),  # first slot to write
        # The slot of each attended row's parent, of that one's parent, ...; -1 before the text.
        tensor(ANCESTORS, TensorProto.INT64, [config.num_preceding, "attended"]),
    ]
