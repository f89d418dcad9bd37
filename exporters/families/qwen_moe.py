"""Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

from edge_spec.core.experts import Experts
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.layers import GGUF_EXPERTS
from edge_spec.exporters.families.stated import EXPERTS, StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    if int(values["decoder_sparse_step"]) != 1 or values["mlp_only_layers"]:
        raise stated.refuse("experts in some layers alone")
    return {
        "intermediate_size": int(values["moe_intermediate_size"]),
        "num_experts": int(values.get("num_experts") or values["num_local_experts"]),
        "experts_used": int(values["num_experts_per_tok"]),
        "experts": Experts(normalized=bool(values["norm_topk_prob"])),
    }


def _of_metadata(stated: StatedMetadata) -> Fields:
    """llama.cpp normalizes, whatever config.json said."""
    return {
        "intermediate_size": stated.require("expert_feed_forward_length", int),
        "num_experts": stated.require("expert_count", int),
        "experts_used": stated.require("expert_used_count", int),
        "experts": Experts(),
    }


QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    architectures=("qwen3moe",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    defaults={"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False},
    parts={"mlp.gate": "mlp.router"},
    gguf_parts=GGUF_EXPERTS,
    computes=(EXPERTS,),
)
