"""The layer for multi-token prediction (MTP) in a model's own files, read as a head for it: as
DeepSeek-V3 and GLM-4.5 name it, and as MiMo does, which joins state and embedding the other way
round (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

Layers with experts or with DeepSeek's latent attention are refused by the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.heads.eagle import head_config, require_target, with_weights
from edge_spec.exporters.heads.eagle_tensors import our_name, published_name, require_shapes
from edge_spec.exporters.heads.stored_tensors import StoredTensors
from edge_spec.exporters.mtp_layers import MIMO_PREFIX, mtp_prefix
from edge_spec.exporters.stored_tensor import StoredTensor

# Theirs -> ours.
_DEEPSEEK = MappingProxyType(
    {
        "enorm.weight": "embed_norm",
        "hnorm.weight": "state_norm",
        "eh_proj.weight": "fc.weight",
        "embed_tokens.weight": "embed",
        "shared_head.norm.weight": "norm",
        "shared_head.head.weight": "head",
    }
)
_MIMO = MappingProxyType(
    {
        "token_layernorm.weight": "embed_norm",
        "hidden_layernorm.weight": "state_norm",
        "input_proj.weight": "fc.weight",
        "final_layernorm.weight": "norm",
    }
)


class _StateFirst(StoredTensors):
    """Tensors of which fc joins the state and then the embedding: its halves change places."""

    def __getitem__(self, name: str) -> np.ndarray:
        found = super().__getitem__(name)
        return np.roll(found, found.shape[1] // 2, axis=1) if name == "fc.weight" else found


def mtp_head(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    target: ModelConfig,
    has_weights: bool,
) -> EagleHead:
    """values: of config.json; tensors: of the whole model. Raises as `open_head` does."""
    prefix = mtp_prefix(values, tensors)
    if prefix is None:
        raise ModelFileError(
            f"{path} states layers for multi-token prediction, and has none",
            remedy="Download the model again, or use it without them.",
        )
    is_mimo = prefix == MIMO_PREFIX
    names = _MIMO if is_mimo else _DEEPSEEK
    named: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix) or name.endswith("rotary_emb.inv_freq"):
            continue
        own = name.removeprefix(prefix)
        ours = names.get(own) or our_name("layers.0." + own)
        if ours is None:
            raise UnsupportedModelError(
                f"{path} has {name[:200]} in its layer for multi-token prediction, which is not "
                "computed",
                remedy="Use the model without --draft.",
            )
        named[ours] = tensor
    head = EagleHead(
        kind="MTP",
        path=path,
        config=head_config(path, values, named, target, "mtp"),
        feature_layers=(target.num_layers,),
        feature_size=target.hidden_size,
        tensors={},
        joins_embedding=True,
        norms_inputs=True,
        returns_normed=True,
    )
    require_target(head, named, values, target)
    theirs = {own: prefix + name for name, own in names.items()}
    require_shapes(
        head,
        named,
        target.vocab_size,
        frozenset(),
        lambda own: theirs.get(own) or prefix + published_name(own).removeprefix("layers.0."),
    )
    if not has_weights:
        return head
    read = with_weights(head, named)
    return replace(read, tensors=_StateFirst(named)) if is_mimo else read
