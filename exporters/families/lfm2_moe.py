"""LFM2 with experts (Liquid AI 2025, LFM2-8B-A1B): in all layers but the first ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from edge_spec.core.config import ModelConfig
from edge_spec.core.experts import Experts
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.layers import GGUF_EXPERTS
from edge_spec.exporters.families.lfm2 import (
    LFM2,
    channels_alone,
    layers_of_config,
    layers_of_metadata,
)
from edge_spec.exporters.families.stated import EXPERTS, SHORT_CONVOLUTIONS, StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata
from edge_spec.exporters.stored_tensor import StoredTensor

_SIGMOID = 2  # as GGUF numbers what makes weights of a router's scores
_EXPERT = re.compile(r"(.+)\.feed_forward\.experts\.(\d+)\.(w[123])\.weight")
_PARTS = MappingProxyType({"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    experts = Experts(
        normalized=bool(values["norm_topk_prob"]),
        sigmoid=True,
        choice_bias=bool(values["use_expert_bias"]),
        scale=float(values["routed_scaling_factor"]),
    )
    dense = int(values["num_dense_layers"]), int(values["intermediate_size"])
    return {
        **layers_of_config(stated),
        "intermediate_size": int(values["moe_intermediate_size"]),
        "num_experts": int(values["num_experts"]),
        "experts_used": int(values["num_experts_per_tok"]),
        "experts": _after_dense(experts, *dense),
    }


def _of_metadata(stated: StatedMetadata) -> Fields:
    """llama.cpp normalizes and scales nothing, whatever config.json said."""
    gate = stated.require("expert_gating_func", int)
    if gate != _SIGMOID:
        raise UnsupportedModelError(
            f"{stated.metadata.path} weighs its experts by the function {gate}, not by a sigmoid",
            remedy="Convert the model again.",
        )
    dense = (
        stated.get("leading_dense_block_count", int) or 0,
        stated.require("feed_forward_length", int),
    )
    has_bias = any(name.endswith(".expert_bias") for name in stated.tensors)
    return {
        **layers_of_metadata(stated),
        "intermediate_size": stated.require("expert_feed_forward_length", int),
        "num_experts": stated.require("expert_count", int),
        "experts_used": stated.require("expert_used_count", int),
        "experts": _after_dense(Experts(sigmoid=True, choice_bias=has_bias), *dense),
    }


def _after_dense(experts: Experts, count: int, size: int) -> Experts:
    """Puts experts in all layers but the first ones, which have one MLP of this size."""
    return replace(experts, dense_layers=count, dense_size=size) if count else experts


def _of_tensors(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    return {_our_name(name): each for name, each in channels_alone(config, tensors).items()}


def _our_name(name: str) -> str:
    found = _EXPERT.fullmatch(name)
    return f"{found[1]}.mlp.experts.{found[2]}.{_PARTS[found[3]]}.weight" if found else name


LFM2_MOE = Family(
    model_types=("lfm2_moe",),
    architectures=("lfm2moe",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    defaults={
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_expert_bias": True,
    },
    keys={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    parts={**LFM2.parts, "feed_forward.gate": "mlp.router", "feed_forward": "mlp"},
    gguf_parts={
        **LFM2.gguf_parts,
        **GGUF_EXPERTS,
        "exp_probs_b.bias": "mlp.expert_bias",
    },
    others=LFM2.others,
    computes=(EXPERTS, SHORT_CONVOLUTIONS),
    of_tensors=_of_tensors,
)
