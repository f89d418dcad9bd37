"""A published model, opened but not yet converted."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_spec.core.config import ModelConfig, config_problem
from edge_spec.core.model_info import SpecialTokens
from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.exporters.tensor_shapes import expected_shapes

MAX_CONTEXT_TOKENS = 1 << 24  # several times what any model has; rotary tables grow with it
_MAX_COUNT = 1 << 40  # of anything; a number of thousands of digits cannot even be shown
# Tensors from which nothing is computed that a description does not state.
_ROTATIONS = (
    "rotary_emb.inv_freq",
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


@dataclass(frozen=True, eq=False)
class StoredCheckpoint:
    """A model as published; weights stay on disk until they are asked for.

    Raises ModelFileError when it is made unless every tensor that `config` implies is there in
    its shape, UnsupportedModelError if there are weights that `config` does not imply.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool  # whether every prompt begins with it
    read_tokenizer: Callable[[], str]
    sampling: RecommendedSampling = NOTHING_STATED
    named_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: SpecialTokens = field(default_factory=dict)
    tokenizer_digest: str | None = None  # None where it is read as it is
    end_sources: Mapping[int, str] = field(default_factory=dict)  # what states each of eos_ids

    def __post_init__(self) -> None:
        problem = _problem(self.config, len(self.tensors))
        if problem:
            raise ModelFileError(
                f"{self.path}: {problem}", remedy="Download or convert the model again."
            )
        expected = expected_shapes(self.config)
        extra = [n for n in self.tensors if n not in expected and not n.endswith(_ROTATIONS)]
        if extra:
            raise UnsupportedModelError(
                f"{self.path} has weights that this version does not use, such as {extra[0]}",
                remedy="Use a model without them (docs/models.md lists what is computed).",
            )
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
                raise ModelFileError(
                    f"{self.path}: tensor {name} {found}, expected {list(shape)}",
                    remedy="Download or convert the model again.",
                )

    @property
    def weight_types(self) -> frozenset[str]:
        return frozenset(tensor.kind.name for tensor in self.tensors.values())

    def names(self) -> Iterator[str]:
        return iter(expected_shapes(self.config))

    def float32(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.tensors[name].rows(rows).float32()

    def release_pages(self) -> None:
        """Lets go of what was read of its files, which counts as this process's memory till then.

        What is needed again is read again, mostly from the system's own cache.
        """
        maps = {id(found): found for each in self.tensors.values() if (found := each.file_map)}
        for found in maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                found.madvise(mmap.MADV_DONTNEED)

    def tokenizer_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` library."""
        return self.read_tokenizer()


def _problem(config: ModelConfig, num_tensors: int) -> str | None:
    """Why no model can have this shape; checked before anything of its size is made."""
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


def first_layers(checkpoint: StoredCheckpoint, num_layers: int) -> StoredCheckpoint:
    """The checkpoint without the layers from `num_layers` on; embedding, norm and head stay.

    Raises UsageError unless it has that many, one with attention among them.
    """
    config = checkpoint.config
    least = config.attending[0] + 1  # without attention nothing tells how long a text is
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
