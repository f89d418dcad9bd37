"""ERNIE 4.5 without experts (Baidu 2025): Llama, but neighbours in a head are rotated together."""

from __future__ import annotations

from collections.abc import Mapping

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.families.family import Family, Fields, turned
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.stored_tensor import StoredTensor


def _of_config(stated: StatedConfig) -> Fields:
    if stated.values.get("use_bias"):
        raise stated.refuse("biases in its MLPs")
    return {}


def _in_halves(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name: turned(name, each, config.head_dim, True) for name, each in stored.items()}


ERNIE = Family(
    model_types=("ernie4_5",),
    architectures=("ernie4_5",),
    of_config=_of_config,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    is_permuted=True,
    of_tensors=_in_halves,
)
