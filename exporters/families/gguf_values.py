"""What a GGUF file states of its model, in the words of config.json: a family is read once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.families.stated import (
    FACTORS,
    FULL,
    FURTHER_MAGNITUDE,
    MAX_LAYERS,
    ORIGINAL,
    ROTARY_DIM,
    SLIDING,
)
from edge_spec.exporters.gguf_reader import Metadata
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

# Keys of GGUF, after the architecture's name, that a model may have: their names in config.json,
# and their types. As in llama.cpp, a zero states nothing.
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
_SHORT = "rope_factors_short.weight"


class GgufKeys:
    """The metadata of a GGUF file, by keys without their architecture."""

    def __init__(
        self, metadata: Metadata, architecture: str, tensors: Mapping[str, StoredTensor]
    ) -> None:
        """tensors: the file's, by our names."""
        self.metadata = metadata
        self.architecture = architecture
        self.tensors = tensors

    def get(self, key: str, kind: type) -> Any:
        """Returns the value; None where it is not stated. Raises ModelFileError for another
        type."""
        return self.metadata.get(f"{self.architecture}.{key}", kind)

    def require(self, key: str, kind: type) -> Any:
        return self.metadata.require(f"{self.architecture}.{key}", kind)

    @property
    def num_layers(self) -> int:
        return int(self.require("block_count", int))

    def per_layer(self, key: str, usual: int | None = None) -> list[int]:
        """Returns a count of each layer: one is stated for all, or an array. usual: where none is.

        Raises ModelFileError for what are no counts."""
        stated = self.metadata.values.get(f"{self.architecture}.{key}")
        if isinstance(stated, np.ndarray) and stated.dtype.kind in "iu" and stated.size:
            return [int(count) for count in stated[: self.num_layers]]
        found = self.require(key, int) if usual is None else self.get(key, int) or usual
        return [int(found)] * min(self.num_layers, MAX_LAYERS)

    def values(self, is_permuted: bool) -> dict[str, Any]:
        """Returns what the file states, by the keys of config.json.

        is_permuted: whether rows of q and k are interleaved pairs. Raises ModelFileError,
        UnsupportedModelError."""
        num_heads = int(self.require("attention.head_count", int))
        if num_heads < 1:
            raise damaged(f"{self.metadata.path} has {num_heads} attention heads")
        hidden_size = int(self.require("embedding_length", int))
        head_dim = self._head_dim(hidden_size // num_heads)
        has_no_mlp = 0 if self.get("expert_count", int) else None  # maybe: experts alone
        inner_sizes = self.per_layer("feed_forward_length", has_no_mlp)
        values = {
            "model_type": self.architecture,
            "num_hidden_layers": self.num_layers,
            "hidden_size": hidden_size,
            "intermediate_size": next(iter(inner_sizes), 0),
            "num_attention_heads": num_heads,
            "num_key_value_heads": max(
                self.per_layer("attention.head_count_kv", num_heads), default=0
            ),
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
        return {**values, **self._layer_types()}

    def _layer_types(self) -> dict[str, Any]:
        key = "attention.sliding_window_pattern"
        stated = self.metadata.values.get(f"{self.architecture}.{key}")
        if not isinstance(stated, np.ndarray):
            return {"sliding_window_pattern": self.get(key, int)}
        return {"layer_types": [SLIDING if each else FULL for each in stated[: self.num_layers]]}

    def _context_length(self) -> int:
        """The original one where there are other factors for longer texts: see StatedConfig."""
        stretched = int(self.require("context_length", int))
        original = self.get("rope.scaling.original_context_length", int)
        return min(stretched, original) if _SHORT in self.tensors and original else stretched

    def _head_dim(self, usual: int) -> int:
        """Raises UnsupportedModelError unless keys and values are of one size."""
        stated: int | None = self.get("attention.key_length", int)
        head_dim = usual if stated is None else stated
        if self.get("attention.value_length", int) not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self.metadata.path} has keys of {head_dim} elements and values of another size",
                remedy="Use a model whose keys and values are of one size.",
            )
        return head_dim

    def _rotary_dim(self, head_dim: int, is_permuted: bool) -> int | None:
        rotated: int | None = self.get("rope.dimension_count", int)
        if is_permuted and rotated not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self.metadata.path} rotates {rotated} of the {head_dim} elements of a head",
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
