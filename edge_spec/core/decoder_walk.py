"""The walk over a model's layers that all backends share. A backend supplies the operations, on
numpy arrays in the reference runtime, on named graph nodes in exporters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from edge_spec.core.config import ModelConfig

Value = TypeVar("Value")

EMBEDDED = "embedded"  # residual stream before the first sublayer
_OWN = "layer_inputs."


class DecoderWalk(Generic[Value]):
    """One forward pass. Arguments are names or prefixes of tensors; `output` names the result where
    values have names.

    The residual stream [rows, hidden] is two addends, the last sublayer's update (None: zero) and
    the rest, because some backends fuse addition and norm. A backend needs only the operations that
    its models use.
    """

    config: ModelConfig
    # (table, output): rows of a table, by token or by position.
    look_up: Callable[[str, str], Value]
    # (x, prefix, parts, has_bias=False): x times the transposed matrices, concatenated.
    linear: Callable[..., Value]
    norm: Callable[..., Value]  # (x, name, output="")
    # (update, residual, name): the normed stream, and the stream.
    add_and_norm: Callable[[Value | None, Value, str], tuple[Value, Value]]
    plus: Callable[[Value, Value, str], Value]
    product: Callable[[Value, Value, str], Value]
    times: Callable[[Value, float, str], Value]  # by a constant; with 1, x itself
    vector: Callable[[str], Value]
    softcap: Callable[[Value, float, str], Value]  # bounded by +-cap (Gemma Team 2024, Gemma 2)
    activation: Callable[[Value, str], Value]  # (x, prefix)
    # (x, layer): output of attention, convolution (Liquid AI 2025, LFM2) or cross-attention for the
    # normed stream x, last matrix included.
    attend: Callable[[Value, int], Value]
    convolve: Callable[[Value, int], Value]
    attend_to_source: Callable[[Value, int], Value]
    split_heads: Callable[[Value, int, str], Value]  # (x, layer, part): separates the heads
    rotate: Callable[[Value, int, str], Value]
    norm_values: Callable[[Value], Value]  # without a weight
    attend_all: Callable[[Value, str], Value]  # (x, prefix): an encoder's self-attention, unmasked
    # (x, routed, prefix); routed: input of the router.
    mix_experts: Callable[[Value, Value, str], Value]
    head: Callable[[Value, str], Value]  # product with the output matrix
    # (x, name, output): norm of each layer's own inputs, [rows, layers * size].
    norm_inputs: Callable[[Value, str, str], Value]
    split_inputs: Callable[[Value, Sequence[str]], Sequence[Value]]
    # (update, residual, prefix): multiplies the stream by the layer's own number.
    scale_layer: Callable[[Value, Value, str], tuple[Value | None, Value]]

    @property
    def head_name(self) -> str:
        """Tensor of the output matrix, which may be the embeddings'."""
        return "model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"

    def embed(self, half: str = "model") -> Value:
        """Return the stream before the first layer. half: "model" or "encoder"."""
        config = self.config
        placed = EMBEDDED + ".placed" if config.input_norm else EMBEDDED
        scaled = EMBEDDED + ".tokens" if config.position_table else placed
        stored = scaled if config.embedding_scale == 1.0 else EMBEDDED + ".stored"
        embedded = self.look_up("model.embed_tokens.weight", stored)
        embedded = self.times(embedded, config.embedding_scale, scaled)
        if config.position_table:
            found = self.look_up(f"{half}.embed_positions.weight", EMBEDDED + ".positions")
            embedded = self.plus(embedded, found, placed)
        return (
            self.norm(embedded, f"{half}.input_norm", EMBEDDED) if config.input_norm else embedded
        )

    def layer_inputs(self, embedded: Value) -> Sequence[Value]:
        """Return each layer's own embeddings, [rows, size] each: slices of a row of one table, plus
        slices of a projection of the token's embedding."""
        own = self.config.layer_embeddings
        if own is None:
            return ()
        stored = self.look_up("model.embed_tokens_per_layer.weight", _OWN + "stored")
        stored = self.times(stored, own.scale, _OWN + "scaled")
        projected = self.linear(embedded, "model.", ["per_layer_model_projection"])
        projected = self.times(projected, own.projected_scale, _OWN + "projected")
        normed = self.norm_inputs(projected, "model.per_layer_projection_norm", _OWN + "normed")
        both = self.times(self.plus(normed, stored, _OWN + "sum"), own.sum_scale, _OWN + "all")
        return self.split_inputs(both, [f"{_OWN}{n}" for n in range(self.config.num_layers)])

    def pass_layer(
        self, layer: int, update: Value | None, residual: Value, inputs: Sequence[Value] = ()
    ) -> tuple[Value | None, Value]:
        """Pass one decoder layer. inputs: from `layer_inputs`."""
        prefix = f"model.layers.{layer}."
        normed, residual = self.read(update, residual, prefix + "input_layernorm")
        added = self.mix_rows(normed, layer)
        if self.config.encoder is not None:
            normed, residual = self.read(added, residual, prefix + "cross_attn.input_norm")
            added = self.attend_to_source(normed, layer)
        normed, residual = self.read(added, residual, prefix + "post_attention_layernorm")
        added = self.feed_forward(normed, residual, layer)
        if inputs:
            residual = self.plus(added, residual, prefix + "stream")
            gate = self.linear(residual, prefix, ["per_layer_input_gate"])
            activated = self.activation(gate, prefix + "per_layer_input.")
            product = self.product(activated, inputs[layer], prefix + "per_layer_input.product")
            added = self.linear(product, prefix, ["per_layer_projection"])
            added = self.norm(added, prefix + "post_per_layer_input_norm")
        if self.config.layer_scale:
            return self.scale_layer(added, residual, prefix)
        return added, residual

    def pass_encoder_layer(
        self, layer: int, update: Value | None, residual: Value
    ) -> tuple[Value, Value]:
        prefix = f"encoder.layers.{layer}."
        normed, residual = self.read(update, residual, prefix + "input_layernorm")
        added = self.attend_all(normed, prefix + "self_attn.")
        normed, residual = self.read(added, residual, prefix + "post_attention_layernorm")
        return self.update(self.mlp(normed, prefix + "mlp."), prefix + "mlp."), residual

    def read(self, update: Value | None, residual: Value, norm: str) -> tuple[Value, Value]:
        """Return a sublayer's input, and the stream that continues."""
        config, is_first = self.config, norm.endswith(".layers.0.input_layernorm")
        if config.norm_places == "after" or (is_first and not config.embedding_norm):
            stream = residual if update is None else self.plus(update, residual, norm + ".sum")
            return stream, stream
        normed, stream = self.add_and_norm(update, residual, norm)
        return normed, normed if config.norm_places == "stream" else stream

    def mix_rows(self, x: Value, layer: int) -> Value:
        """Return the update by attention or convolution. x: normed."""
        prefix = f"model.layers.{layer}."
        if self.config.kind(layer).convolution is None:
            return self.update(self.attend(x, layer), prefix + "self_attn.")
        return self.update(self.convolve(x, layer), prefix + "conv.")

    def heads(self, x: Value, layer: int, part: str) -> Value:
        """Return all heads of part "q", "k" or "v", normed and (q, k) rotated as the model does."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn."
        is_key = part == "v" and config.kind(layer).keys_as_values
        projected = self.linear(x, prefix, [f"{'k' if is_key else part}_proj"], config.qkv_bias)
        norm = f"{prefix}{part}_norm" if config.qk_norm and part != "v" else None
        if norm and config.qk_norm_whole:
            projected, norm = self.norm(projected, norm), None
        split = self.split_heads(projected, layer, part)
        if part == "v":
            return self.norm_values(split) if config.value_norm else split
        if config.qk_norm_after_rope:
            split = self.rotate(split, layer, part)
        split = self.norm_heads(split, norm) if norm else split
        return split if config.qk_norm_after_rope else self.rotate(split, layer, part)

    def norm_heads(self, x: Value, name: str) -> Value:
        return self.norm(x, name)

    def feed_forward(self, x: Value, stream: Value, layer: int) -> Value:
        """Return the update by MLP, experts or both. x: the stream, normed."""
        experts, prefix = self.config.experts, f"model.layers.{layer}.mlp."
        if experts is None or not self.config.mixes(layer):
            return self.update(self.mlp(x, prefix), prefix)
        if not experts.beside_mlp:
            return self.update(self.mix_experts(x, x, prefix), prefix)
        dense = self.norm(self.mlp(x, prefix), prefix + "dense_post_norm")
        routed = self.norm(stream, prefix + "router_norm")
        mixed = self.mix_experts(self.norm(stream, prefix + "experts_norm"), routed, prefix)
        mixed = self.norm(mixed, prefix + "experts_post_norm")
        return self.update(self.plus(dense, mixed, prefix + "both"), prefix)

    def mlp(self, x: Value, prefix: str) -> Value:
        if self.config.gated_mlp:
            return self.linear(self.gate(x, prefix), prefix, ["down_proj"])
        up = self.linear(x, prefix, ["up_proj"], self.config.mlp_bias)
        activated = self.activation(up, prefix)
        return self.linear(activated, prefix, ["down_proj"], self.config.mlp_bias)

    def gate(self, x: Value, prefix: str) -> Value:
        """Return the input of a gated MLP's last matrix (GLU variants: Shazeer 2020)."""
        gate = self.activation(self.linear(x, prefix, ["gate_proj"]), prefix)
        return self.product(gate, self.linear(x, prefix, ["up_proj"]), prefix + "product")

    def update(self, added: Value, prefix: str) -> Value:
        """Norm and scale the output of a sublayer's last matrix."""
        if self.config.norm_places in ("around", "after"):
            added = self.norm(added, prefix + "post_norm")
        return self.times(added, self.config.residual_scale, prefix + "update")

    def score(self, hidden: Value) -> Value:
        """Return logits for rows after the final norm."""
        config = self.config
        scaled = "logits" if config.logit_softcap is None else "logits.scaled"
        products = scaled if config.logit_scale == 1.0 else "logits.products"
        scores = self.head(hidden, "logits.unbiased" if config.logit_bias else products)
        if config.logit_bias:
            scores = self.plus(scores, self.vector("lm_head.bias"), products)
        scores = self.times(scores, config.logit_scale, scaled)
        if config.logit_softcap is None:
            return scores
        return self.softcap(scores, config.logit_softcap, "logits")
