"""Build one step of any trained head as an ONNX graph.

A drafted block sees itself whole, so no causal operator fits: query heads that share keys are rows
of one matrix (as in exporters/onnx/attention.py). The cache is read in place; the bias hides what
is beyond its entries, and only scores are concatenated with those of new keys.

Medusa heads score together if they share an output matrix; else each is a branch of an `If`, which
costs nothing unless asked for. Experts use onnxruntime's operator: a head's last bits do not
matter, unlike a model's (exporters/onnx/experts.py).

Matrices are stored next to the graph: protobuf ends at 2 GB, and a runtime maps a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import BinaryIO, Generic, TypeVar

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto

from edge_spec.core.heads import (
    FLOAT_BITS,
    SHORTLIST,
    WEIGHTS_FILE,
    DFlashHead,
    EagleHead,
    HeadExperts,
    HeadMatrix,
    MedusaHead,
    TrainedHead,
)
from edge_spec.exporters.block_quantize import channels, joined, quantize, turns_of
from edge_spec.exporters.onnx.experts import add_moe
from edge_spec.exporters.onnx.nodes import (
    CONTRIB,
    Initializers,
    Nodes,
    tensor,
)

LIKELIEST = 4  # likeliest tokens returned per row; a tree row has no more children
_RESCORED = 16  # candidates in 4 bits that contain the likeliest token in 8 bits


class HeadGraph(Nodes):
    """A graph or branch that reads a head's matrices.

    matrices: by names as in `core.heads.HeadBackend`; bits: 4, 8, or FLOAT_BITS for float32.
    """

    def __init__(
        self, weights: Initializers, matrices: Mapping[str, HeadMatrix], bits: int
    ) -> None:
        super().__init__(weights)
        self.matrices, self.bits = matrices, bits

    def branch(self) -> HeadGraph:
        return HeadGraph(self.weights, self.matrices, self.bits)

    def multiply(self, x: str, name: str, output: str = "") -> str:
        """Multiply x: [..., in] -> [..., out].

        An output matrix has at least 8 bits, since low precision harms most there. With 4 bits
        elsewhere, it is first read in 4, half the bytes, and the likeliest tokens are scored again
        in 8.
        """
        matrix, output = self.matrices[name], output or name + ".output"
        if not matrix.is_output:
            return self.multiply_by(matrix, x, name, output, self.bits)
        if self.bits != 4 or matrix.bias is not None:
            return self.multiply_by(matrix, x, name, output, max(self.bits, 8))
        scores = self.multiply_by(matrix, x, name, output + ".rough", self.bits)
        levels, scales = zip(*(channels(read()) for read in matrix.parts), strict=True)
        stored = self.weights.add(name + ".rows", np.concatenate(levels))
        row_scales = self.weights.add(name + ".row_scales", np.concatenate(scales))
        kept = self.constant("rescored", [min(_RESCORED, sum(map(len, levels)))])
        rough, ids = output + ".rough.best", output + ".rough.ids"
        self.add("TopK", [scores, kept], [rough, ids], axis=-1)
        rows = self.add("Gather", [stored, ids], output + ".rows", axis=0)
        floats = self.add("Cast", [rows], output + ".floats", to=TensorProto.FLOAT)
        last = self.constant("last_axis", [-1])
        column = self.add("Unsqueeze", [x, last], output + ".column")
        products = self.add("MatMul", [floats, column], output + ".products")
        own = self.add("Gather", [row_scales, ids], output + ".scales", axis=0)
        flat = self.add("Squeeze", [products, last], output + ".flat")
        exact = self.add("Mul", [flat, own], output + ".exact")
        return self.add("ScatterElements", [scores, ids, exact], output, axis=-1)

    def multiply_by(self, matrix: HeadMatrix, x: str, name: str, output: str, bits: int) -> str:
        """Multiply by a matrix stored as `name`, without zero points, and add its bias."""
        bias = None if matrix.bias is None else matrix.bias.astype(np.float32)
        if bits == FLOAT_BITS:
            whole = np.concatenate([read() for read in matrix.parts]).T
            inputs = [x, self.weights.add(name, whole)]
            if bias is None:
                return self.add("MatMul", inputs, output)
            product = self.add("MatMul", inputs, output + ".product")
            return self.add("Add", [product, self.weights.add(name + ".bias", bias)], output)
        weight = joined([quantize(read(), bits, symmetric=True) for read in matrix.parts])
        own_bias = None if bias is None else (name + ".bias", bias)
        return self.multiply_stored(x, name, weight, output, own_bias)

    def silu(self, x: str, output: str) -> str:
        return self.add("Mul", [x, self.add("Sigmoid", [x], x + ".sigmoid")], output)

    def tell_likeliest(
        self, logits: str, tokens: int, count: int = LIKELIEST
    ) -> list[ValueInfoProto]:
        """Add `likeliest` and `shares` (probabilities) of `logits` [rows, tokens], in falling
        order; return all three as outputs."""
        probs = self.add("Softmax", [logits], "probs", axis=-1)
        kept = self.constant("kept", [min(count, tokens)])
        self.add("TopK", [probs, kept], ["shares", "likeliest"], axis=-1)
        return [
            tensor(logits, TensorProto.FLOAT, ["scored", "tokens"]),
            tensor("likeliest", TensorProto.INT64, ["scored", "count"]),
            tensor("shares", TensorProto.FLOAT, ["scored", "count"]),
        ]

    def mixture(self, x: str, experts: HeadExperts, prefix: str) -> str:
        """Add a mixture of experts: x [1, rows, hidden] -> the same. prefix: of the layer's
        matrices."""
        router = np.concatenate([read() for read in self.matrices[prefix + "router"].parts])
        hidden = router.shape[1]
        rows = self.reshape(x, "expert_rows_shape", [-1, hidden], prefix + "rows")
        stored = self.weights.add(prefix + "router", router)
        scores = self.add("Gemm", [rows, stored], prefix + "scores", transB=1)
        up, down = (
            [*self._stacked(prefix, experts.count, part), ""] for part in ("gate_up", "down")
        )
        attributes: dict[str, float] = {"activation_alpha": 1.0, "activation_beta": 0.0}
        if self.bits == FLOAT_BITS:
            attributes["normalize_routing_weights"] = 1
        bits = None if self.bits == FLOAT_BITS else self.bits
        output, attributes["k"] = prefix + "mixed_rows", experts.used
        mixed = add_moe(self, [rows, scores], (up, down), output, bits, **attributes)
        return self.reshape(mixed, "pass_shape", [1, -1, hidden], prefix + "mixture")

    def _stacked(self, prefix: str, count: int, part: str) -> list[str]:
        """Store the matrices of experts: return one name of floats, or those of packed values,
        scales and zero points. Rows of gate and up alternate for the operator."""
        matrices = (self.matrices[f"{prefix}experts.{expert}.{part}"] for expert in range(count))
        experts = (turns_of([read() for read in each.parts]) for each in matrices)
        name = f"{prefix}{part}.experts"
        if self.bits == FLOAT_BITS:
            return [self.weights.add(name, np.stack([*experts]))]
        return self.store_experts(
            name, [quantize(each, self.bits, symmetric=True) for each in experts]
        )


_Head = TypeVar("_Head", EagleHead, DFlashHead)


class LayersGraph(HeadGraph, Generic[_Head]):
    """Common parts of layers: Llama's and Qwen3's formulas. bits: of layers; output matrices
    follow."""

    def __init__(
        self,
        head: _Head,
        matrices: Mapping[str, HeadMatrix],
        bits: int,
        weights: BinaryIO,
    ) -> None:
        super().__init__(Initializers(weights, WEIGHTS_FILE), matrices, bits)
        self._head: _Head = head
        self._config, self._tensors = head.config, head.tensors
        self._experts = head.experts if isinstance(head, EagleHead) else None
        self._norms = {name: head.tensors[name] for name in head.tensors if "norm" in name}

    def _turned(self, x: str, heads: int, positions: str) -> str:
        """Norm (if any) and rotate queries or keys. x: [1, rows, heads * head_dim]."""
        config = self._config
        partial = {"rotary_embedding_dim": config.rotary_dim} if config.rotary_dim else {}
        return self.add(
            "RotaryEmbedding",
            [self._norm_each(x), positions, "cos", "sin"],
            x + ".turned",
            domain=CONTRIB,
            num_heads=heads,
            **partial,
        )

    def _leave(self, stream: str, mixed: str, layer: int) -> str:
        prefix = f"layers.{layer}."
        attended = self.multiply(mixed, prefix + "o")
        stream = self.add("Add", [stream, attended], prefix + "attended")
        read = self._norm(stream, prefix + "post_norm")
        joined = self.multiply(read, prefix + "gate_up")
        halves = [prefix + "gate", prefix + "up"]
        self.add("Split", [joined], halves, axis=-1, num_outputs=2)
        gated = self.silu(halves[0], prefix + "activated")
        product = self.add("Mul", [gated, halves[1]], prefix + "product")
        update = self.multiply(product, prefix + "down")
        if self._experts is not None:
            shared = self.add(
                "Sigmoid", [self.multiply(read, prefix + "shared_gate")], prefix + "shared"
            )
            own = self.add("Mul", [update, shared], prefix + "own")
            mixed = self.mixture(read, self._experts, prefix)
            update = self.add("Add", [own, mixed], prefix + "both")
        return self.add("Add", [stream, update], prefix + "stream")

    def _norm(self, x: str, name: str) -> str:
        weight = self._norms.get(name)
        if weight is None:
            return x
        stored = self.weights.add(name, weight.astype(np.float32))
        return self.rms_norm(x, stored, self._config.norm_epsilon, name + ".output")

    def _norm_each(self, x: str) -> str:
        if f"{x}_norm" not in self._norms:
            return x
        size = self._config.head_dim
        split = self.reshape(x, "head_shape", [1, 0, -1, size], x + ".heads")
        normed = self._norm(split, f"{x}_norm")
        return self.reshape(normed, "flat_shape", [1, 0, -1], x + ".flat")

    def _tables(self) -> list[ValueInfoProto]:
        half = self._config.rotated // 2
        return [tensor(name, TensorProto.FLOAT, ["positions", half]) for name in ("cos", "sin")]

    def _keys_values(self, when: str, slots: str) -> list[ValueInfoProto]:
        """Return all layers' keys and values, named `when`.LAYER.PART."""
        shape: list[int | str] = [1, self._config.num_kv_heads, slots, self._config.head_dim]
        return [
            tensor(f"{when}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self._config.num_layers)
            for part in ("key", "value")
        ]


class EagleGraph(LayersGraph[EagleHead]):
    def built(self) -> ModelProto:
        stream, read = self._enter()
        for layer in range(self._config.num_layers):
            if layer:
                read = self._norm(stream, f"layers.{layer}.input_norm")
            stream = self._leave(stream, self._attend(read, layer), layer)
        self._score(stream)
        return self.model("head", self._inputs(), self._outputs())

    def _enter(self) -> tuple[str, str]:
        both = self.add("Concat", [self._known(), "replaced"], "unordered", axis=1)
        features = self.add("Gather", [both, "order"], "features", axis=1)
        if self._head.joins_embedding:
            embedded = self._norm("embedded", "embed_norm")
            beside = [embedded, self._norm(features, "state_norm")]
            stream = self.multiply(self.add("Concat", beside, "beside", axis=-1), "fc")
            return stream, self._norm(stream, "layers.0.input_norm")
        normed = self._norm(features, "layers.0.hidden_norm")
        beside = [self._norm("embedded", "layers.0.input_norm"), normed]
        stream = normed if self._head.adds_to_normed else features
        return stream, self.add("Concat", beside, "beside", axis=-1)

    def _known(self) -> str:
        """Return the stream's form of known features, [1, known, hidden]."""
        if self._head.joins_embedding:
            return "found"
        normed, count = "found", len(self._head.feature_layers)
        if "feature_norm.0" in self._norms:
            parts = [f"found.{index}" for index in range(count)]
            self.add("Split", ["found"], parts, axis=-1, num_outputs=count)
            each = [self._norm(part, f"feature_norm.{i}") for i, part in enumerate(parts)]
            normed = self.add("Concat", each, "found.normed", axis=-1)
        return self.multiply(self._norm(normed, "fc_norm"), "fc")

    def _attend(self, read: str, layer: int) -> str:
        config, prefix = self._config, f"layers.{layer}."
        sizes = [config.query_size, config.kv_size, config.kv_size]
        parts = [prefix + each for each in "qkv"]
        gate = prefix + "q_gate"
        if is_gated := f"{gate}.weight" in self._tensors:
            sizes, parts = [*sizes, config.query_size], [*parts, gate]
        packed = self.multiply(read, prefix + "qkv")
        self.add("Split", [packed, self.constant("qkv_sizes", sizes)], parts, axis=-1)
        turned = [
            self._turned(prefix + part, count, "position_ids")
            for part, count in (("q", config.num_heads), ("k", config.num_kv_heads))
        ]
        past, present = (
            [f"{when}.{layer}.{part}" for part in ("key", "value")] for when in ("past", "present")
        )
        lengths = ["seqlens_k", "total_sequence_length"]
        inputs = [*turned, parts[2], *past, *lengths, "", "", "", "attention_bias"]
        mixed = self.add(
            "GroupQueryAttention",
            inputs,
            [prefix + "mixed", *present],
            domain=CONTRIB,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
        )
        if not is_gated:
            return mixed
        opened = self.add("Sigmoid", [gate], gate + ".opened")
        return self.add("Mul", [mixed, opened], prefix + "gated")

    def _score(self, stream: str) -> None:
        normed = self._norm(stream, "norm")
        goes_on = normed if self._head.returns_normed else stream
        self.add("Identity", [goes_on], "states")
        picked = self.add("Gather", [normed, "logit_rows"], "scored", axis=1)
        self.multiply(picked, "head", "logits")

    def _inputs(self) -> list[ValueInfoProto]:
        """rows: entries made in this pass; total: with earlier ones. The operator masks later
        rows."""
        kinds, size = TensorProto, self._config.hidden_size
        return [
            tensor("embedded", kinds.FLOAT, [1, "rows", size]),  # embeddings of the tokens
            # The target's features, the states of rows without, and each row's index in both.
            tensor("found", kinds.FLOAT, [1, "known", "features"]),
            tensor("replaced", kinds.FLOAT, [1, "others", size]),
            tensor("order", kinds.INT64, ["rows"]),
            tensor("position_ids", kinds.INT64, [1, "rows"]),
            *self._tables(),
            # 0 where a row sees an entry, else -inf.
            tensor("attention_bias", kinds.FLOAT, [1, 1, "rows", "total"]),
            tensor("seqlens_k", kinds.INT32, [1]),  # total - 1
            tensor("total_sequence_length", kinds.INT32, []),
            tensor("logit_rows", kinds.INT64, ["scored"]),  # rows to score
            *self._keys_values("past", "capacity"),
        ]

    def _outputs(self) -> list[ValueInfoProto]:
        kind, size = TensorProto.FLOAT, self._config.hidden_size
        return [
            tensor("states", kind, [1, "rows", size]),  # input of the next rows
            tensor("logits", kind, [1, "scored", "tokens"]),
            *self._keys_values("present", "capacity"),  # the inputs' buffers
        ]


class DFlashGraph(LayersGraph[DFlashHead]):
    def built(self) -> ModelProto:
        context = self._norm(self.multiply("found", "fc"), "context_norm")
        stream = "embedded"
        for layer in range(self._config.num_layers):
            read = self._norm(stream, f"layers.{layer}.input_norm")
            stream = self._leave(stream, self._attend(context, read, layer), layer)
        picked = self.add("Gather", [stream, "logit_rows"], "picked", axis=1)
        normed = self._norm(picked, "norm")
        scored = self.reshape(normed, "rows_shape", [-1, self._config.hidden_size], "states")
        logits = self.multiply(scored, "head", "logits")
        ids, all_tokens = self._head.token_ids, self._config.vocab_size
        told = LIKELIEST if self._head.transitions is None else SHORTLIST
        num_scored = all_tokens if ids is None else len(ids)
        outputs = self.tell_likeliest(logits, num_scored, told)
        if self._head.keeps_states:
            shape: list[int | str] = ["scored", self._config.hidden_size]
            outputs.append(tensor("states", TensorProto.FLOAT, shape))
        made = self._keys_values("made", "known")
        return self.model("block", self._inputs(), [*outputs, *made])

    def _attend(self, context: str, read: str, layer: int) -> str:
        """Return [1, block, heads * head_dim]."""
        config, prefix = self._config, f"layers.{layer}."
        whole = self.matrices[prefix + "qkv"]
        query, beside = HeadMatrix(whole.parts[:1]), HeadMatrix(whole.parts[1:])
        self.multiply_by(query, read, prefix + "q.weight", prefix + "q", self.bits)
        rows = self.add("Concat", [context, read], prefix + "rows", axis=1)
        packed = self.multiply_by(beside, rows, prefix + "kv", prefix + "kv.output", self.bits)
        parts = [prefix + "k", prefix + "v"]
        self.add("Split", [packed], parts, axis=-1, num_outputs=2)
        queries = self._turned(prefix + "q", config.num_heads, "block_position_ids")
        keys = self._turned(prefix + "k", config.num_kv_heads, "position_ids")
        size = config.head_dim
        shape = [1, config.num_kv_heads, -1, size]
        stacked = self.reshape(self._by_head(queries), "stacked", shape, prefix + "stacked")
        made = [self._by_head(each) for each in (keys, prefix + "v")]
        for part, entries in zip(("key", "value"), made, strict=True):
            names = [f"made.{layer}.{part}", f"{prefix}{part}.block"]
            self.add("Split", [entries, "parts"], names, axis=2)
        mixed = self._mix(stacked, made, layer)
        apart = self.reshape(mixed, "apart", [1, config.num_heads, -1, size], prefix + "apart")
        by_row = self.add("Transpose", [apart], prefix + "by_row", perm=[0, 2, 1, 3])
        return self.reshape(by_row, "flat_shape", [1, 0, -1], prefix + "mixed")

    def _mix(self, queries: str, made: list[str], layer: int) -> str:
        """Return [1, kv_heads, stacked rows, head_dim]: attention to the cache and to new
        entries."""
        prefix = f"layers.{layer}."
        past = [f"past.{layer}.{part}" for part in ("key", "value")]
        scale = self._config.head_dim**-0.5

        def scores(keys: str, name: str) -> str:
            inputs, output = [queries, keys], prefix + name
            return self.add("FusedMatMul", inputs, output, domain=CONTRIB, transB=1, alpha=scale)

        seen = self.add(
            "Add", [scores(past[0], "past_scores"), "attention_bias"], prefix + "past_seen"
        )
        both = [seen, scores(made[0], "made_scores")]
        beside = self.add("Concat", both, prefix + "scores", axis=-1)
        weights = self.add("Softmax", [beside], prefix + "weights", axis=-1)
        parts = [prefix + "past_weights", prefix + "made_weights"]
        self.add("Split", [weights, "widths"], parts, axis=-1)
        each = [
            self.add("MatMul", [part, values], part + ".mixed")
            for part, values in zip(parts, (past[1], made[1]), strict=True)
        ]
        return self.add("Add", each, prefix + "stacked.mixed")

    def _by_head(self, x: str) -> str:
        """[1, rows, heads * head_dim] -> [1, heads, rows, head_dim]."""
        shape = [1, 0, -1, self._config.head_dim]
        split = self.reshape(x, "head_shape", shape, x + ".split")
        return self.add("Transpose", [split], x + ".by_head", perm=[0, 2, 1, 3])

    def _inputs(self) -> list[ValueInfoProto]:
        """known: tokens before the block that are read with it; rows: known and block."""
        kinds, size = TensorProto, self._config.hidden_size
        return [
            # The pending token and the masks after it.
            tensor("embedded", kinds.FLOAT, [1, "block", size]),
            tensor("found", kinds.FLOAT, [1, "known", "features"]),  # the target's features
            tensor("position_ids", kinds.INT64, [1, "rows"]),
            tensor("block_position_ids", kinds.INT64, [1, "block"]),  # the last of position_ids
            *self._tables(),
            # 0 where the block sees an entry, else -inf.
            tensor("attention_bias", kinds.FLOAT, [1, 1, 1, "capacity"]),
            tensor("parts", kinds.INT64, [2]),  # known, block
            tensor("widths", kinds.INT64, [2]),  # capacity, rows
            tensor("logit_rows", kinds.INT64, ["scored"]),  # rows of the block to score
            *self._keys_values("past", "capacity"),
        ]


class MedusaGraph(HeadGraph):
    """matrices: K.B of block B of head K, and output.K, or one shared output.0."""

    def __init__(
        self, head: MedusaHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
    ) -> None:
        super().__init__(Initializers(weights, WEIGHTS_FILE), matrices, bits)
        self._head = head

    def built(self) -> ModelProto:
        head = self._head
        shares = len(head.outputs) == 1
        if shares:
            logits = self.multiply(self._states(), "output.0", "logits")
        else:
            rows = [self._where_asked(index) for index in range(head.num_heads)]
            logits = self.add("Concat", rows, "logits", axis=0)
        outputs = self.tell_likeliest(logits, self._num_scored)
        # The state after the target's final norm; and the heads to score.
        inputs = [tensor("state", TensorProto.FLOAT, [1, head.hidden_size])]
        if not shares:
            inputs.append(tensor("asked", TensorProto.BOOL, [head.num_heads]))
        return self.model("heads", inputs, outputs)

    @property
    def _num_scored(self) -> int:
        ids = self._head.token_ids
        return self._head.vocab_size if ids is None else len(ids)

    def _states(self) -> str:
        """Return [heads, hidden], the states after all blocks."""
        head = self._head
        count = range(head.num_heads)
        if all(len(blocks) == 1 for blocks in head.blocks):
            return self._after_one_block([self.matrices[f"{index}.0"] for index in count])
        states = [self._after_blocks(self, index) for index in count]
        return self.add("Concat", states, "states", axis=0)

    def _where_asked(self, index: int) -> str:
        """Return [1, tokens], or [0, tokens] if the head is not asked for."""
        name = f"{index}.logits"
        scored, none = self.branch(), self.branch()
        after = self._after_blocks(scored, index)
        scored_rows = scored.multiply(after, f"output.{index}", name + ".then")
        nothing = self.weights.add("no_rows", np.zeros((0, self._num_scored), np.float32))
        no_rows = none.add("Identity", [nothing], name + ".else")
        place = self.constant(f"{index}.place", [index])
        asked = self.add("Gather", ["asked", place], f"{index}.asked", axis=0)
        branches = scored.subgraph(scored_rows, [scored_rows]), none.subgraph(no_rows, [no_rows])
        return self.choose(asked, name, *branches)

    def _after_one_block(self, blocks: Sequence[HeadMatrix]) -> str:
        """All heads read the same state, so their matrices are joined."""
        head = self._head
        biases = [each.bias for each in blocks if each.bias is not None]
        parts = tuple(part for each in blocks for part in each.parts)
        joined = HeadMatrix(parts, np.concatenate(biases))
        inner = self.multiply_by(joined, "state", "blocks", "blocks.inner", self.bits)
        shape, active = [head.num_heads, head.hidden_size], self.silu(inner, "blocks.silu")
        update = self.reshape(active, "head_rows", shape, "update")
        return self.add("Add", ["state", update], "states")

    def _after_blocks(self, graph: HeadGraph, index: int) -> str:
        """z + SiLU(A z + b) for each block."""

        def after(state: str, block: int) -> str:
            name = f"{index}.{block}"
            inner = graph.multiply(state, name, name + ".inner")
            return graph.add("Add", [state, graph.silu(inner, name + ".silu")], name + ".state")

        return reduce(after, range(len(self._head.blocks[index])), "state")


def step_graph(
    head: TrainedHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
) -> bytes:
    """Return a serialized ModelProto; writes the weights to `weights`.

    matrices, bits: as in HeadGraph. Output matrices score the likeliest tokens with at least 8
    bits.
    """
    if isinstance(head, MedusaHead):
        model = MedusaGraph(head, matrices, bits, weights).built()
    elif isinstance(head, EagleHead):
        model = EagleGraph(head, matrices, bits, weights).built()
    else:
        assert isinstance(head, DFlashHead)  # numpy computes assistants
        model = DFlashGraph(head, matrices, bits, weights).built()
    return bytes(model.SerializeToString())
