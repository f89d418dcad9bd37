"""What a model's files state, in the forms that families have in common."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from edge_spec.core.rope import Rope, RopeScaling
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.families.layers import FULL, SLIDING, last_of
from edge_spec.exporters.families.yarn import Yarn
from edge_spec.exporters.gguf_metadata import Metadata
from edge_spec.exporters.stored_tensor import StoredTensor

_ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
    }
)
# Keys of config.json for what no family here has; a model that sets one is another model.
_LACKED = MappingProxyType(
    {
        "kv_lora_rank": "multi-head latent attention",
        "q_lora_rank": "multi-head latent attention",
        "mlp_bias": "biases in its MLPs",
        "num_local_experts": "a mixture of experts",
        "num_experts": "a mixture of experts",
        "n_routed_experts": "a mixture of experts",
        "sparse_config": "sparse attention",
        "attention_chunk_size": "attention in chunks",
        "clip_qkv": "clipped queries, keys and values",
        "use_bidirectional_attention": "attention to later tokens",
        "use_parallel_residual": "parallel residuals",
    }
)
_LAYER_TYPES = (FULL, SLIDING, "attention")  # as Granite 4 calls FULL


def lacked_feature(values: Mapping[str, Any]) -> str | None:
    """Returns what config.json names that is not computed here, in words; None: nothing known."""
    named = (feature for key, feature in _LACKED.items() if values.get(key))
    types = values.get("layer_types")
    types = types if isinstance(types, list) else []
    others = [f"layers of {reprlib.repr(kind)}" for kind in types if kind not in _LAYER_TYPES]
    activation = _activation(values)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        others.append(f"the activation {reprlib.repr(activation)}")
    return next(named, others[0] if others else None)


def _activation(values: Mapping[str, Any]) -> Any:
    return values.get("hidden_activation") or values.get("hidden_act") or "silu"


class StatedConfig:
    """A config.json. What it lacks raises KeyError, what is of another type TypeError, ValueError
    or AttributeError."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    @property
    def context_length(self) -> int:
        return int(self.values["max_position_embeddings"])

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

    def layer_types(self, period: int) -> list[str]:
        """FULL or SLIDING of each layer. period: of layers whose last one is FULL, if none is
        stated."""
        stated = self.values.get("layer_types")
        if stated:
            return list(stated)
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            period = int(self.values.get(key) or period)
        return last_of(period, int(self.values["num_hidden_layers"]))

    @property
    def activation(self) -> str:
        return _ACTIVATIONS[_activation(self.values)]

    @property
    def rotary_dim(self) -> int | None:
        """None: all of a head is rotated."""
        nested = self.values.get("rope_parameters") or {}
        part = self.values.get("partial_rotary_factor", nested.get("partial_rotary_factor"))
        rotated = self.head_dim if part is None else int(self.head_dim * float(part))
        return None if rotated == self.head_dim else rotated

    def refuse(self, feature: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path} asks for {feature}, which this version does not compute",
            remedy="Use a model without it, or convert it to GGUF with llama.cpp's "
            "convert_hf_to_gguf.py and give --runtime llamacpp.",
        )

    def rope(self, layer_type: str = "", key: str = "rope_theta", scaled: bool = True) -> Rope:
        """layer_type: whose, where config.json states one for each type; else key: of its base, and
        scaled: whether it has the scaling that is stated for all.

        Raises UnsupportedModelError for a scaling that is not known.
        """
        nested = self.values.get("rope_parameters") or {}  # where transformers 5 keeps it
        nested = nested.get(layer_type) or nested
        theta = nested.get("rope_theta") or self.values.get(key) or 10000.0
        own = self.values.get("rope_scaling") if scaled else None
        return Rope(float(theta), self.scaling(own or nested))

    def scaling(self, stated: Mapping[str, Any]) -> RopeScaling | None:
        kind = stated.get("rope_type", stated.get("type", "default"))
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=float(stated["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=float(stated["factor"]),
                low_freq_factor=float(stated["low_freq_factor"]),
                high_freq_factor=float(stated["high_freq_factor"]),
                original_context_length=int(stated["original_max_position_embeddings"]),
            )
        if kind in ("longrope", "su"):
            return self._long_scaling(stated)
        if kind == "yarn":
            return self._yarn(stated)
        raise UnsupportedModelError(
            f"{self.path} scales its rotary embedding by {reprlib.repr(kind)}",
            remedy="Supported: default, linear, llama3, longrope and yarn.",
        )

    def _yarn(self, stated: Mapping[str, Any]) -> RopeScaling:
        rotated = self.head_dim if self.rotary_dim is None else self.rotary_dim
        original = stated.get("original_max_position_embeddings") or self.context_length
        factor = float(stated.get("factor") or self.context_length / int(original))
        theta = float(stated.get("rope_theta") or self.values.get("rope_theta") or 10000.0)
        yarn = Yarn(
            factor,
            int(original),
            fast_turns=float(stated.get("beta_fast") or 32),
            slow_turns=float(stated.get("beta_slow") or 1),
            in_whole_steps=bool(stated.get("truncate", True)),
        )
        magnitude = stated.get("attention_factor")
        if magnitude is None:
            scale, overall = stated.get("mscale"), stated.get("mscale_all_dim")
            magnitude = yarn.magnitude()
            if scale and overall:
                magnitude = yarn.magnitude(float(scale)) / yarn.magnitude(float(overall))
        return RopeScaling("factors", factors=yarn.factors(theta, rotated), magnitude=magnitude)

    def _long_scaling(self, stated: Mapping[str, Any]) -> RopeScaling:
        """LongRoPE (Ding et al. 2024) for texts of the original length."""
        factors = tuple(map(float, stated["short_factor"]))
        magnitude = stated.get("attention_factor")
        if magnitude is None:
            original = self.values.get("original_max_position_embeddings")
            original = int(original or stated["original_max_position_embeddings"])
            grown = max(self.context_length / original, 1.0)
            magnitude = math.sqrt(1 + math.log(grown) / math.log(original))
        return RopeScaling("factors", factors=factors, magnitude=float(magnitude))


class StatedMetadata:
    """The metadata of a GGUF file, by keys without their architecture."""

    def __init__(
        self, metadata: Metadata, architecture: str, tensors: Mapping[str, StoredTensor]
    ) -> None:
        """tensors: the file's, by our names."""
        self.metadata = metadata
        self.architecture = architecture
        self.tensors = tensors

    def get(self, key: str, kind: type) -> Any:
        """None where it is not stated. Raises ModelFileError for a value of another type."""
        return self.metadata.get(f"{self.architecture}.{key}", kind)

    def require(self, key: str, kind: type) -> Any:
        return self.metadata.require(f"{self.architecture}.{key}", kind)

    @property
    def context_length(self) -> int:
        return int(self.require("context_length", int))

    @property
    def num_layers(self) -> int:
        return int(self.require("block_count", int))

    @property
    def num_heads(self) -> int:
        """Raises ModelFileError for less than 1."""
        found = int(self.require("attention.head_count", int))
        if found < 1:
            raise ModelFileError(
                f"{self.metadata.path} has {found} attention heads",
                remedy="Convert the model again.",
            )
        return found

    def layer_types(self, period: int) -> list[str]:
        """FULL or SLIDING of each layer. period: of layers whose last one is FULL, if none is
        stated."""
        key = f"{self.architecture}.attention.sliding_window_pattern"
        stated = self.metadata.values.get(key)
        if isinstance(stated, np.ndarray):
            return [SLIDING if slides else FULL for slides in stated[: self.num_layers]]
        return last_of(self.metadata.get(key, int) or period, self.num_layers)

    def head_dim(self) -> int:
        """Raises UnsupportedModelError unless keys and values are of one size."""
        stated: int | None = self.get("attention.key_length", int)
        hidden_size = int(self.require("embedding_length", int))
        head_dim = hidden_size // self.num_heads if stated is None else stated
        if self.get("attention.value_length", int) not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self.metadata.path} has keys of {head_dim} elements and values of another size",
                remedy="Use a model whose keys and values are of one size.",
            )
        return head_dim

    def rotary_dim(self, is_permuted: bool) -> int | None:
        """None: all of a head is rotated. is_permuted: whether it has to be, as the rows of q and k
        stand. Raises UnsupportedModelError."""
        head_dim = self.head_dim()
        rotated: int | None = self.get("rope.dimension_count", int)
        if rotated in (None, head_dim):
            return None
        if is_permuted:
            raise UnsupportedModelError(
                f"{self.metadata.path} rotates {rotated} of the {head_dim} elements of a head",
                remedy="Use a model that rotates all of them.",
            )
        return rotated

    def rope(self) -> Rope:
        """Raises UnsupportedModelError for a scaling that is not known."""
        return Rope(self.get("rope.freq_base", float) or 10000.0, self._scaling())

    def _scaling(self) -> RopeScaling | None:
        for name in ("rope_freqs.weight", "rope_factors_short.weight"):
            if (factors := self.tensors.get(name)) is not None:
                divisors = tuple(map(float, factors.float32().ravel()))
                magnitude = self.get("rope.scaling.attn_factor", float) or 1.0
                return RopeScaling("factors", factors=divisors, magnitude=magnitude)
        kind = self.get("rope.scaling.type", str)
        if kind in (None, "none"):
            return None
        if kind != "linear":
            raise UnsupportedModelError(
                f"{self.metadata.path} scales its rotary embedding by {reprlib.repr(kind)}",
                remedy="Supported: none, linear and llama3.",
            )
        return RopeScaling("linear", factor=self.require("rope.scaling.factor", float))
