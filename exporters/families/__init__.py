"""The families of models that exporters read: a file for each, and nothing about them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edge_spec.exporters.families import (
    bart,
    gemma,
    gemma4,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    lfm2_moe,
    llama,
    mbart,
    minicpm,
    ministral,
    olmo,
    phi,
    qwen_moe,
    smollm3,
    t5,
)
from edge_spec.exporters.families.family import Family

_FAMILIES = (
    llama.PERMUTED,
    llama.PLAIN,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma4.GEMMA4,
    granite.GRANITE,
    granite.GRANITE4,
    smollm3.SMOLLM3,
    minicpm.MINICPM,
    phi.PHI,
    olmo.OLMO2,
    olmo.OLMO3,
    olmo.EXAONE4,
    hunyuan.HUNYUAN,
    ministral.MINISTRAL,
    qwen_moe.QWEN3_MOE,
    gpt_oss.GPT_OSS,
    lfm2.LFM2,
    lfm2_moe.LFM2_MOE,
    t5.T5,
    bart.BART,
    bart.MARIAN,
    mbart.MBART,
    mbart.PEGASUS,
    mbart.M2M,
)

# By the model_type of config.json, and by the general.architecture of GGUF files.
BY_MODEL_TYPE: Mapping[str, Family] = MappingProxyType(
    {name: family for family in _FAMILIES for name in family.model_types}
)
BY_ARCHITECTURE: Mapping[str, Family] = MappingProxyType(
    {name: family for family in _FAMILIES for name in family.architectures}
)


def told_model_types() -> str:
    """Returns the model types that are read, with what of them is computed, for a message."""
    return ", ".join(
        f"{name} ({family.limits[name]})" if name in family.limits else name
        for name, family in BY_MODEL_TYPE.items()
    )
