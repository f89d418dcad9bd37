"""Reads what the metadata of a GGUF file state, in the forms that families have in common."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_spec.core.model_parts import Experts
from edge_spec.core.rope import Rope, RopeScaling
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.families.stated import FULL, MAX_LAYERS, SLIDING, Yarn, last_of
from edge_spec.exporters.gguf_metadata import Metadata
from edge_spec.exporters.stored_tensor import StoredTensor

_SHORT = "rope_factors_short.weight"


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
        """Returns the value; None where it is not stated. Raises ModelFileError for another
        type."""
        return self.metadata.get(f"{self.architecture}.{key}", kind)

    def require(self, key: str, kind: type) -> Any:
        return self.metadata.require(f"{self.architecture}.{key}", kind)

    @property
    def context_length(self) -> int:
        """The original one where there are other factors for longer texts: see StatedConfig."""
        stretched = int(self.require("context_length", int))
        original = self.get("rope.scaling.original_context_length", int)
        return min(stretched, original) if _SHORT in self.tensors and original else stretched

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

    @property
    def num_kv_heads(self) -> int:
        """The largest number where each layer has one of its own."""
        return max(self.kv_heads_of_layers(), default=0)

    def kv_heads_of_layers(self) -> list[int]:
        """Raises ModelFileError for what are no counts."""
        key = f"{self.architecture}.attention.head_count_kv"
        stated = self.metadata.values.get(key)
        if isinstance(stated, np.ndarray) and stated.dtype.kind in "iu":
            return [int(count) for count in stated[: self.num_layers]]
        found: int = self.metadata.get(key, int) or self.num_heads
        return [found] * min(self.num_layers, MAX_LAYERS)

    def intermediate_sizes(self) -> list[int]:
        """Returns how many elements the MLP of each layer has between its matrices. Raises
        ModelFileError for what are no counts."""
        key = f"{self.architecture}.feed_forward_length"
        stated = self.metadata.values.get(key)
        if isinstance(stated, np.ndarray) and stated.dtype.kind in "iu" and stated.size:
            return [int(size) for size in stated[: self.num_layers]]
        return [int(self.metadata.require(key, int))] * min(self.num_layers, MAX_LAYERS)

    def experts(self, experts: Experts) -> dict[str, Any]:
        """Returns the fields of a model whose layers have such experts."""
        return {
            "intermediate_size": self.require("expert_feed_forward_length", int),
            "num_experts": self.require("expert_count", int),
            "experts_used": self.require("expert_used_count", int),
            "experts": experts,
        }

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
        """Returns how much of a head is rotated; None: all of it.

        is_permuted: whether all has to be, as the rows of q and k stand. Raises
        UnsupportedModelError."""
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
        for name in ("rope_freqs.weight", _SHORT):
            if (factors := self.tensors.get(name)) is not None:
                divisors = tuple(map(float, factors.float32().ravel()))
                magnitude = self.get("rope.scaling.attn_factor", float) or 1.0
                return RopeScaling("factors", factors=divisors, magnitude=magnitude)
        kind = self.get("rope.scaling.type", str)
        if kind in (None, "none"):
            return None
        if kind == "yarn":
            return self._yarn()
        if kind != "linear":
            raise UnsupportedModelError(
                f"{self.metadata.path} scales its rotary embedding by {reprlib.repr(kind)}",
                remedy="Supported: none, linear, yarn and llama3.",
            )
        return RopeScaling("linear", factor=self.require("rope.scaling.factor", float))

    def _yarn(self) -> RopeScaling:
        """Reads YaRN as llama.cpp computes it: its ramp begins and ends at a pair."""
        factor = float(self.require("rope.scaling.factor", float))
        original = self.get("rope.scaling.original_context_length", int)
        yarn = Yarn(
            factor,
            original or int(self.require("context_length", int)),
            fast_turns=self.get("rope.scaling.yarn_beta_fast", float) or 32.0,
            slow_turns=self.get("rope.scaling.yarn_beta_slow", float) or 1.0,
            in_whole_steps=True,
        )
        theta = self.get("rope.freq_base", float) or 10000.0
        rotated = self.rotary_dim(is_permuted=False) or self.head_dim()
        magnitude = yarn.magnitude() * (self.get("rope.scaling.attn_factor", float) or 1.0)
        overall = self.get("rope.scaling.yarn_log_multiplier", float)
        if overall:
            magnitude /= yarn.magnitude(overall)
        return RopeScaling("factors", factors=yarn.factors(theta, rotated), magnitude=magnitude)
