"""Read config.json's common keys, and translate GGUF metadata to them: a family is read in one
way."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.model_parts import Experts, LayerKind
from edge_spec.core.rope import Rope, RopeScaling
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.gguf_reader import Metadata
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

FULL, SLIDING = "full_attention", "sliding_attention"  # as in config.json's layer_types
MAX_LAYERS = 10_000
# GGUF's and our names of the norms of a sublayer's output.
GGUF_POST_NORMS = {"post_attention_norm": "self_attn.post_norm", "post_ffw_norm": "mlp.post_norm"}
# The same of the router and the stacked matrices of all experts.
GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def last_of(period: int, num_layers: int) -> list[str]:
    """Return layer types: FULL for the last of every `period` layers, else SLIDING."""
    layers = range(min(num_layers, MAX_LAYERS))
    return [FULL if period and (layer + 1) % period == 0 else SLIDING for layer in layers]


def kv_sources(kinds: Sequence[LayerKind], num_own: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads; () if all have their own. Layers
    from `num_own` on read the last own one of their kind; raises ValueError without one."""
    if not 0 < num_own <= len(kinds):
        raise ValueError(f"{num_own} of {len(kinds)} layers have keys and values")
    last = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    if not last.keys() >= set(kinds):
        raise ValueError("a layer attends to the keys and values of none before it")
    sources = tuple(last[kind] for kind in kinds[num_own:])
    return (*range(num_own), *sources) if sources else ()


def of_types(kinds: Mapping[str, LayerKind], types: Sequence[str]) -> dict[str, Any]:
    """Return the ModelConfig fields for layers of these types."""
    used = [name for name in kinds if name in types]
    return {
        "layer_kinds": tuple(kinds[name] for name in used),
        "kind_of_layer": tuple(used.index(name) for name in types),
    }


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
EXPERTS = "a mixture of experts"
CONVOLUTION = "conv"  # as in config.json's layer_types
SHORT_CONVOLUTIONS = f"layers of {CONVOLUTION!r}"
# config.json keys of features that families lack unless they declare them.
_LACKED = {
    "kv_lora_rank": "multi-head latent attention",
    "q_lora_rank": "multi-head latent attention",
    "mlp_bias": "biases in its MLPs",
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "sparse_config": "sparse attention",
    "attention_chunk_size": "attention in chunks",
    "clip_qkv": "clipped queries, keys and values",
    "conv_bias": "biases in its convolutions",
    "use_bidirectional_attention": "attention to later tokens",
    "use_parallel_residual": "parallel residuals",
}
_LONG = ("longrope", "su")  # LongRoPE and its first name
FACTORS = "factors"  # GGUF: a tensor with a divisor for each frequency
_START = "decoder_start_token_id"  # only in encoder-decoder models
ORIGINAL = "original_max_position_embeddings"
ROTARY_DIM = "rotary_dim"  # GGUF: a count where config.json has a share
FURTHER_MAGNITUDE = "further_magnitude"  # GGUF: multiplied with YaRN's magnitude
_UNTURNED = 1e30  # GGUF's frequency divisor of a pair that is not rotated
_OF_PICTURES = "vision"  # attends to later tokens only in images
_LAYER_TYPES = (FULL, SLIDING, "attention")  # "attention": Granite 4's FULL


def lacked_feature(values: Mapping[str, Any], computed: Sequence[str] = ()) -> str | None:
    """Return an unsupported feature of config.json. computed: those that the family supports."""
    stated = (
        feature
        for key, feature in _LACKED.items()
        if values.get(key) and values[key] != _OF_PICTURES
    )
    named = (feature for feature in stated if feature not in computed)
    types = values.get("layer_types")
    types = types if isinstance(types, list) else []
    others = [f"layers of {reprlib.repr(kind)}" for kind in types if kind not in _LAYER_TYPES]
    others = [feature for feature in others if feature not in computed]
    activation = _activation(values)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        others.append(f"the activation {reprlib.repr(activation)}")
    return next(named, others[0] if others else None)


def _activation(values: Mapping[str, Any]) -> Any:
    return values.get("hidden_activation") or values.get("hidden_act") or "silu"


class StatedConfig:
    """A config.json, or GGUF metadata in its keys. A missing value raises KeyError, one of a wrong
    type TypeError, ValueError or AttributeError."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    @property
    def context_length(self) -> int:
        """Return where texts end. LongRoPE changes its factors at the original length; to go on, a
        text would have to be prefilled again."""
        return self.original_length if _kind(self.of_rope) in _LONG else self._stretched_length

    @property
    def _stretched_length(self) -> int:
        return int(self.values["max_position_embeddings"])

    @property
    def of_rope(self) -> Mapping[str, Any]:
        return self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}

    @property
    def original_length(self) -> int:
        original = self.values.get(ORIGINAL) or self.of_rope.get(ORIGINAL)
        return int(original or self._stretched_length)

    @property
    def head_dim(self) -> int:
        stated = self.values.get("head_dim")
        return int(stated or int(self.values["hidden_size"]) // int(self.num_heads))

    @property
    def num_heads(self) -> int:
        return int(self.values["num_attention_heads"])

    def optional(self, key: str) -> float | None:
        value = self.values.get(key)
        return None if value is None else float(value)

    def number(self, key: str, usual: float) -> float:
        value = self.optional(key)
        return usual if value is None else value

    def mixture(self, experts: Experts) -> dict[str, Any]:
        values = self.values
        size = values.get("moe_intermediate_size") or values["intermediate_size"]
        return {
            "intermediate_size": int(size),
            "num_experts": int(values.get("num_local_experts") or values["num_experts"]),
            "experts_used": int(values["num_experts_per_tok"]),
            "experts": experts,
        }

    def layer_types(self, period: int) -> list[str]:
        """Return FULL or SLIDING for each layer. period: default for `last_of`."""
        stated = self.values.get("layer_types")
        if stated:
            return list(stated)
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            period = int(self.values.get(key) or period)
        return last_of(period, int(self.values["num_hidden_layers"]))

    def alternating(self, period: int, local: Rope, full: Rope | None) -> dict[str, Any]:
        """Return the fields of sliding layers, FULL the last of each `period`. Raises KeyError
        without a window."""
        kinds = {
            SLIDING: LayerKind(local, int(self.values["sliding_window"])),
            FULL: LayerKind(full),
        }
        return of_types(kinds, self.layer_types(period))

    @property
    def activation(self) -> str:
        return _ACTIVATIONS[_activation(self.values)]

    @property
    def rotary_dim(self) -> int | None:
        """Return the number of rotated elements of a head; None: all."""
        nested = self.values.get("rope_parameters") or {}
        part = self.values.get("partial_rotary_factor", nested.get("partial_rotary_factor"))
        rotated = self.head_dim if part is None else int(self.head_dim * float(part))
        counted = self.values.get(ROTARY_DIM)
        rotated = rotated if counted is None else counted
        return None if rotated == self.head_dim else rotated

    def refuse(self, feature: str) -> UnsupportedModelError:
        """Suggest GGUF, but not for an encoder-decoder."""
        remedy = "Use a model without it."
        if not (self.values.get("is_encoder_decoder") or _START in self.values):
            remedy = (
                "Use a model without it, or convert it to GGUF with llama.cpp's "
                "convert_hf_to_gguf.py and give --runtime llamacpp."
            )
        return UnsupportedModelError(
            f"{self.path} asks for {feature}, which this version does not compute", remedy=remedy
        )

    def rope(
        self,
        layer_type: str = "",
        key: str = "rope_theta",
        scaled: bool = True,
        head_dim: int | None = None,
    ) -> Rope:
        """Return the RoPE of a layer type. Raises UnsupportedModelError for an unknown scaling.

        If config.json has none for the type, `key` is theta's, and `scaled` selects the common
        scaling. head_dim: of these layers, if not the model's.
        """
        nested = self.values.get("rope_parameters") or {}  # transformers 5
        nested = nested.get(layer_type) or nested
        theta = nested.get("rope_theta") or self.values.get(key) or 10000.0
        stated = (self.values.get("rope_scaling") if scaled else None) or nested
        alpha = stated.get("alpha") if _kind(stated) == "dynamic" else None
        if alpha:  # changes only theta, whatever the length
            return Rope(float(theta) * float(alpha) ** (self.head_dim / (self.head_dim - 2)))
        return Rope(float(theta), self.scaling(stated, head_dim or self.head_dim))

    def scaling(self, stated: Mapping[str, Any], head_dim: int) -> RopeScaling | None:
        kind = _kind(stated)
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=float(stated["factor"]))
        if kind == FACTORS:
            factors = tuple(map(float, stated[FACTORS]))
            magnitude = float(stated["attention_factor"])
            return RopeScaling("factors", factors=factors, magnitude=magnitude)
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=float(stated["factor"]),
                low_freq_factor=float(stated["low_freq_factor"]),
                high_freq_factor=float(stated["high_freq_factor"]),
                original_context_length=int(stated["original_max_position_embeddings"]),
            )
        if kind == "proportional":
            return _proportional(stated, head_dim)
        if kind in _LONG:
            return self._long_scaling(stated)
        if kind == "yarn":
            return self._yarn(stated)
        raise UnsupportedModelError(
            f"{self.path} scales its rotary embedding by {reprlib.repr(kind)}",
            remedy="Supported: default, linear, llama3, longrope, proportional and yarn.",
        )

    def _yarn(self, stated: Mapping[str, Any]) -> RopeScaling:
        """Stretch slow rotations and keep fast ones (Peng et al. 2023, section 3)."""
        rotated = self.head_dim if self.rotary_dim is None else self.rotary_dim
        original = int(stated.get(ORIGINAL) or self.context_length)
        factor = float(stated.get("factor") or self.context_length / original)
        theta = float(stated.get("rope_theta") or self.values.get("rope_theta") or 10000.0)
        turns = float(stated.get("beta_fast") or 32), float(stated.get("beta_slow") or 1)
        # Pairs of a head that rotate this often within the original context.
        wavelengths = (original / (each * 2 * math.pi) for each in turns)
        low, high = (rotated * math.log(each) / (2 * math.log(theta)) for each in wavelengths)
        if stated.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        pairs = np.arange(len(Rope(theta).unscaled(rotated)))
        stretched = np.clip((pairs - low) / (high - low or 0.001), 0.0, 1.0)
        factors = tuple((1 / (stretched / factor + 1 - stretched)).tolist())
        return RopeScaling("factors", factors=factors, magnitude=_yarn_magnitude(factor, stated))

    def _long_scaling(self, stated: Mapping[str, Any]) -> RopeScaling:
        """LongRoPE (Ding et al. 2024) within the original length."""
        factors = tuple(map(float, stated["short_factor"]))
        magnitude = stated.get("attention_factor")
        if magnitude is None:
            grown = max(self._stretched_length / self.original_length, 1.0)
            magnitude = math.sqrt(1 + math.log(grown) / math.log(self.original_length))
        return RopeScaling("factors", factors=factors, magnitude=float(magnitude))


def _yarn_magnitude(factor: float, stated: Mapping[str, Any]) -> float:
    """Return the factor for cos and sin."""

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    magnitude = stated.get("attention_factor")
    if magnitude is None:
        scale, overall = stated.get("mscale"), stated.get("mscale_all_dim")
        magnitude = grown(float(scale)) / grown(float(overall)) if scale and overall else grown(1.0)
    return float(magnitude) * float(stated.get(FURTHER_MAGNITUDE, 1.0))


def _proportional(stated: Mapping[str, Any], head_dim: int) -> RopeScaling:
    """Rotate only the first pairs, at the frequencies of a whole head."""
    num_turned = int(float(stated.get("partial_rotary_factor", 1.0)) * head_dim // 2)
    turned = [float(stated.get("factor", 1.0))] * num_turned
    return RopeScaling("factors", factors=(*turned, *[_UNTURNED] * (head_dim // 2 - num_turned)))


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


# Optional GGUF keys, without the architecture prefix: name in config.json and type. As in
# llama.cpp, zero means absent.
_OPTIONAL = {
    "attention.sliding_window": ("sliding_window", int),
    "expert_count": ("num_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
    "expert_feed_forward_length": ("moe_intermediate_size", int),
    "leading_dense_block_count": ("num_dense_layers", int),
    "shortconv.l_cache": ("conv_L_cache", int),
    "rope.freq_base_swa": ("rope_local_base_freq", float),
    "rope.scaling.original_context_length": (ORIGINAL, int),
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
    "attention.scale": ("attention_multiplier", float),
    "attention.temperature_scale": ("llama_4_scaling_beta", float),
    "embedding_scale": ("embedding_multiplier", float),
    "residual_scale": ("residual_multiplier", float),
    "logit_scale": ("logits_scaling", float),
}
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
_PATTERN = "attention.sliding_window_pattern"
_SHORT = "rope_factors_short.weight"
_MAX_COUNT = 1 << 31  # llama.cpp's counts have 32 bits


class GgufKeys(Metadata):
    """GGUF metadata, by keys without the architecture prefix. tensors: by our names."""

    def __init__(
        self, metadata: Metadata, architecture: str, tensors: Mapping[str, StoredTensor]
    ) -> None:
        super().__init__(metadata.values, metadata.path, f"{architecture}.")
        self.architecture = architecture
        self.tensors = tensors

    @property
    def num_layers(self) -> int:
        return int(self.require("block_count", int))

    def array(self, key: str) -> np.ndarray | None:
        """Return one value per layer; None for a single one or none."""
        stated = self.values.get(f"{self.architecture}.{key}")
        if not (isinstance(stated, np.ndarray) and stated.dtype.kind in "iub" and stated.size):
            return None
        return stated[: self.num_layers]

    def per_layer(self, key: str, usual: int | None = None) -> list[int]:
        """Return one count per layer, from an array or a single value. Raises ModelFileError."""
        stated = self.array(key)
        if stated is not None:
            counts = [int(count) for count in stated]
        else:
            found = self.require(key, int) if usual is None else self.get(key, int) or usual
            counts = [int(found)] * min(self.num_layers, MAX_LAYERS)
        if not counts or not all(0 <= count < _MAX_COUNT for count in counts):
            raise damaged(f"{self.path}: {reprlib.repr(self.architecture)}.{key} is no count")
        return counts

    def as_config(self, is_permuted: bool) -> dict[str, Any]:
        """Return the metadata by config.json's keys. is_permuted: rows of q and k are interleaved
        pairs. Raises ModelFileError, UnsupportedModelError."""
        num_heads = int(self.require("attention.head_count", int))
        if num_heads < 1:
            raise damaged(f"{self.path} has {num_heads} attention heads")
        hidden_size = int(self.require("embedding_length", int))
        head_dim = self._head_dim(hidden_size // num_heads)
        has_no_mlp = 0 if self.get("expert_count", int) else None  # may have experts only
        inner_sizes = self.per_layer("feed_forward_length", has_no_mlp)
        kv_heads = self.per_layer("attention.head_count_kv", num_heads)
        slides = self.array(_PATTERN)
        values = {
            "model_type": self.architecture,
            "num_hidden_layers": self.num_layers,
            "hidden_size": hidden_size,
            "intermediate_size": next(iter(inner_sizes), 0),
            "num_attention_heads": num_heads,
            "num_key_value_heads": max(kv_heads, default=0),
            "head_dim": head_dim,
            "max_position_embeddings": self._context_length(),
            "rms_norm_eps": self.require("attention.layer_norm_rms_epsilon", float),
            "rope_theta": self.get("rope.freq_base", float) or 10000.0,
            "rope_scaling": self._rope_scaling(),
            ROTARY_DIM: self._rotary_dim(head_dim, is_permuted),
        }
        for key, (name, kind) in _OPTIONAL.items():
            if found := self.get(key, kind):
                values[name] = found
        if slides is None:
            return {**values, "sliding_window_pattern": self.get(_PATTERN, int)}
        return {**values, "layer_types": [SLIDING if each else FULL for each in slides]}

    def _context_length(self) -> int:
        """Return the original length where long texts have other factors (see StatedConfig)."""
        stretched = int(self.require("context_length", int))
        original = self.get("rope.scaling.original_context_length", int)
        return min(stretched, original) if _SHORT in self.tensors and original else stretched

    def _head_dim(self, usual: int) -> int:
        stated: int | None = self.get("attention.key_length", int)
        head_dim = usual if stated is None else stated
        if self.get("attention.value_length", int) not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self.path} has keys of {head_dim} elements and values of another size",
                remedy="Use a model whose keys and values are of one size.",
            )
        return head_dim

    def _rotary_dim(self, head_dim: int, is_permuted: bool) -> int | None:
        rotated: int | None = self.get("rope.dimension_count", int)
        if is_permuted and rotated not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self.path} rotates {rotated} of the {head_dim} elements of a head",
                remedy="Use a model that rotates all of them.",
            )
        return rotated

    def _rope_scaling(self) -> dict[str, Any] | None:
        magnitude = self.get("rope.scaling.attn_factor", float) or 1.0
        for name in ("rope_freqs.weight", _SHORT):
            if (factors := self.tensors.get(name)) is not None:
                divisors = factors.float32().ravel()
                return {"rope_type": FACTORS, FACTORS: divisors, "attention_factor": magnitude}
        kind = self.get("rope.scaling.type", str)
        if kind in (None, "none"):
            return None
        return {
            "rope_type": kind,
            "factor": self.get("rope.scaling.factor", float),
            ORIGINAL: self.get("rope.scaling.original_context_length", int),
            "mscale": 1.0,
            **{name: self.get(key, float) for key, name in _YARN.items()},
            FURTHER_MAGNITUDE: magnitude,
        }
