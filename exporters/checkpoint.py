"""A published model, opened but not converted, and the tensors that its ModelConfig implies."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_spec.core.config import ModelConfig, config_problem
from edge_spec.core.model import Progress
from edge_spec.core.model_info import SpecialTokens
from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Return the shape of each tensor that a model has, by Hugging Face's name."""
    hidden, vocab, encoder = config.hidden_size, config.vocab_size, config.encoder
    halves = {"model": config.num_layers} | ({"encoder": encoder.num_layers} if encoder else {})
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    shapes |= {f"{half}.norm.weight": (hidden,) for half in halves}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for half, num_layers in halves.items():
        for layer in range(num_layers):
            shapes |= _layer_shapes(config, f"{half}.layers.{layer}.", layer)
        if config.relative_positions is not None:
            num_buckets = config.relative_positions.num_buckets
            shapes[f"{half}.relative_bias.weight"] = (num_buckets, config.num_heads)
        if config.position_table:
            shapes[f"{half}.embed_positions.weight"] = (config.context_length, hidden)
        if config.input_norm:
            shapes[f"{half}.input_norm.weight"] = (hidden,)
        if not config.embedding_norm:
            shapes.pop(f"{half}.layers.0.input_layernorm.weight", None)
    if config.layer_embeddings is not None:
        all_layers = config.num_layers * config.layer_embeddings.size
        shapes["model.embed_tokens_per_layer.weight"] = (vocab, all_layers)
        shapes["model.per_layer_model_projection.weight"] = (all_layers, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (config.layer_embeddings.size,)
    if config.logit_bias:
        shapes["lm_head.bias"] = (vocab,)
    if config.layer_norm:
        norms = {name: shape for name, shape in shapes.items() if name.endswith("norm.weight")}
        shapes |= {name.removesuffix("weight") + "bias": norms[name] for name in norms}
    return shapes


def _vectors(prefix: str, names: Iterable[str], size: int) -> Shapes:
    return {f"{prefix}{name}.weight": (size,) for name in names}


def _layer_shapes(config: ModelConfig, prefix: str, layer: int) -> Shapes:
    hidden, embeddings = config.hidden_size, config.layer_embeddings
    shapes: Shapes = {}
    if config.norm_places != "after":
        shapes |= _vectors(prefix, ("input_layernorm", "post_attention_layernorm"), hidden)
    if config.norm_places in ("around", "after"):
        shapes |= _vectors(prefix, ("self_attn.post_norm", "mlp.post_norm"), hidden)
    shapes |= _mlp_shapes(config, prefix + "mlp.", layer)
    if embeddings is not None:
        shapes[prefix + "per_layer_input_gate.weight"] = (embeddings.size, hidden)
        shapes[prefix + "per_layer_projection.weight"] = (hidden, embeddings.size)
        shapes[prefix + "post_per_layer_input_norm.weight"] = (hidden,)
    if config.layer_scale:
        shapes[prefix + "layer_scalar"] = (1,)
    kernel = config.kind(layer).convolution
    if kernel is not None:
        shapes[prefix + "conv.in_proj.weight"] = (3 * hidden, hidden)
        shapes[prefix + "conv.conv.weight"] = (hidden, kernel)
        shapes[prefix + "conv.out_proj.weight"] = (hidden, hidden)
        return shapes
    shapes |= _attention_shapes(config, prefix + "self_attn.", layer)
    if config.attention_sinks:
        shapes[prefix + "self_attn.sinks"] = (config.num_heads,)
    if config.encoder is not None and prefix.startswith("model."):
        shapes[prefix + "cross_attn.input_norm.weight"] = (hidden,)
        shapes |= _attention_shapes(config, prefix + "cross_attn.", layer)
    return shapes


def _attention_shapes(config: ModelConfig, prefix: str, layer: int) -> Shapes:
    """Include norms; leave out what comes from another layer or from the keys."""
    hidden, heads = config.hidden_size, config.heads(layer)
    sizes = {"q_proj": heads.query_size}
    if config.kv_source(layer) == layer:
        sizes |= {"k_proj": heads.kv_size, "v_proj": heads.kv_size}
        if config.kind(layer).keys_as_values:
            del sizes["v_proj"]
    shapes: Shapes = {f"{prefix}{part}.weight": (size, hidden) for part, size in sizes.items()}
    shapes[prefix + "o_proj.weight"] = (hidden, heads.query_size)
    if config.qkv_bias:
        shapes |= {f"{prefix}{part}.bias": (size,) for part, size in sizes.items()}
    if config.output_bias:
        shapes[prefix + "o_proj.bias"] = (hidden,)
    for part, size in zip("qk", config.qk_norm_sizes(layer), strict=True):
        if config.qk_norm and f"{part}_proj" in sizes:
            shapes[f"{prefix}{part}_norm.weight"] = (size,)
    return shapes


def _mlp_shapes(config: ModelConfig, prefix: str, layer: int) -> Shapes:
    shapes: Shapes = {}
    if config.has_mlp(layer):
        shapes |= _matrix_shapes(config, prefix, config.mlp_size(layer), config.mlp_bias)
    experts = config.experts if config.mixes(layer) else None
    if experts is None:
        return shapes
    if experts.choice_bias:
        shapes[prefix + "expert_bias"] = (config.num_experts,)
    if experts.expert_scales:
        shapes[prefix + "expert_scale"] = (config.num_experts,)
    if experts.beside_mlp:
        norms = ("router_norm", "experts_norm", "experts_post_norm", "dense_post_norm")
        shapes |= _vectors(prefix, norms, config.hidden_size)
    for expert in range(config.num_experts):
        own, size = f"{prefix}experts.{expert}.", config.intermediate_size
        shapes |= _matrix_shapes(config, own, size, experts.biases)
    shapes[prefix + "router.weight"] = (config.num_experts, config.hidden_size)
    if experts.biases:
        shapes[prefix + "router.bias"] = (config.num_experts,)
    return shapes


def _matrix_shapes(config: ModelConfig, prefix: str, inner: int, has_biases: bool) -> Shapes:
    hidden = config.hidden_size
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if not config.gated_mlp:
        del parts["gate_proj"]
    shapes: Shapes = {}
    for part, shape in parts.items():
        shapes[f"{prefix}{part}.weight"] = shape
        if has_biases:
            shapes[f"{prefix}{part}.bias"] = shape[:1]
    return shapes


MAX_CONTEXT_TOKENS = 1 << 24  # several times any model's
_MAX_COUNT = 1 << 40  # larger numbers may be too long to print
# Tensors that only repeat what the configuration defines.
_ROTATIONS = (
    "rotary_emb.inv_freq",
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelText:
    """How a published model tokenizes text and ends answers."""

    path: Path = field(kw_only=False)
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool  # every prompt begins with it
    read_tokenizer: Callable[[], str]
    sampling: RecommendedSampling = NOTHING_STATED
    named_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: SpecialTokens = field(default_factory=dict)
    tokenizer_digest: str | None = None  # None if unchanged
    end_sources: Mapping[int, str] = field(default_factory=dict)  # ID -> files

    def tokenizer_json(self) -> str:
        """Return the tokenizer in the `tokenizers` library's format."""
        return self.read_tokenizer()


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """Weights by Hugging Face's names, which stay on disk until used."""

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def float32(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.tensors[name].rows(rows).float32()


@dataclass(frozen=True, eq=False)
class StoredCheckpoint(StoredWeights, ModelText):
    """A published model. Raises ModelFileError unless every tensor that `config` implies is present
    in its shape, UnsupportedModelError for further weights."""

    def __post_init__(self) -> None:
        problem = _problem(self.config, len(self.tensors))
        if problem:
            raise damaged(f"{self.path}: {problem}")
        expected = expected_shapes(self.config)
        extra = [n for n in self.tensors if n not in expected and not n.endswith(_ROTATIONS)]
        if extra:
            raise UnsupportedModelError(
                f"{self.path} has weights that this version does not use, such as {extra[0]}",
                remedy="Use a model without them (docs/families.md lists what is computed).",
            )
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
                raise damaged(f"{self.path}: tensor {name} {found}, expected {list(shape)}")

    @property
    def weight_types(self) -> frozenset[str]:
        return frozenset(tensor.kind.name for tensor in self.tensors.values())

    def names(self) -> Iterator[str]:
        return iter(expected_shapes(self.config))

    def on_layer(self, progress: Progress) -> Callable[[int], None]:
        """Return what an exporter calls after each layer that it wrote."""

        def written(layer: int) -> None:
            self.release_pages()
            progress("Converting the weights", (layer + 1) / self.config.num_layers)

        return written

    def release_pages(self) -> None:
        """Drop pages read so far, which count as this process's memory. The system's cache mostly
        keeps them."""
        maps = {id(found): found for each in self.tensors.values() if (found := each.file_map)}
        for found in maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                found.madvise(mmap.MADV_DONTNEED)


def _problem(config: ModelConfig, num_tensors: int) -> str | None:
    """Return why no model has this shape. Runs before anything of its size is allocated."""
    counts = (
        *(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim),
        *(config.hidden_size, config.intermediate_size, config.vocab_size, config.context_length),
    )
    if max(map(abs, counts)) > _MAX_COUNT:
        return f"it has a count of more than {_MAX_COUNT}"
    if min(counts) < 1:
        return f"it has a count of {min(counts)}, expected 1 or more"
    if config.num_layers + (config.encoder.num_layers if config.encoder else 0) > num_tensors:
        return f"it has {config.num_layers} layers, but {num_tensors} tensors"
    mixing = config.num_layers - config.experts.dense_layers if config.experts else 0
    if mixing * config.num_experts > num_tensors:
        return f"it has {config.num_experts} experts a layer, but {num_tensors} tensors"
    if config.context_length > MAX_CONTEXT_TOKENS:
        return (
            f"its context is {config.context_length} tokens, expected {MAX_CONTEXT_TOKENS} or less"
        )
    if config.head_dim % 2 or config.num_heads % config.num_kv_heads:
        return (
            f"{config.num_heads} attention heads of {config.head_dim} do not share "
            f"{config.num_kv_heads} of keys and values"
        )
    if not 0 < config.norm_epsilon < 1:
        return f"its norm epsilon is {config.norm_epsilon}"
    return config_problem(config)


def first_layers(checkpoint: StoredCheckpoint, num_layers: int | None) -> StoredCheckpoint:
    """Keep the first `num_layers` layers (None: all), embedding, norm and head. Raises UsageError
    unless they exist and include attention."""
    config = checkpoint.config
    if num_layers is None:
        return checkpoint
    least = config.attending[0] + 1  # only attention counts tokens
    if not least <= num_layers <= config.num_layers:
        raise UsageError(
            f"{checkpoint.path} has {config.num_layers} layers, {num_layers} are asked for",
            remedy=f"Choose {least} to {config.num_layers}.",
        )
    if config.layer_embeddings is not None:
        raise UsageError(
            f"{checkpoint.path} has embeddings of its layers, which stand in one table",
            remedy="Convert all of its layers.",
        )
    prefixes = tuple(f"model.layers.{layer}." for layer in range(num_layers, config.num_layers))
    tensors = {
        name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(prefixes)
    }
    shorter = replace(
        config,
        num_layers=num_layers,
        kind_of_layer=config.kind_of_layer[:num_layers],
        kv_sources=config.kv_sources[:num_layers],
        intermediate_sizes=config.intermediate_sizes[:num_layers],
    )
    return replace(checkpoint, config=shorter, tensors=tensors)
