"""Qwen 3.5's layer for multi-token prediction (MTP; DeepSeek-AI 2024, DeepSeek-V3, section 2.2) in
a model's own files, read as a head for it.

In GGUF it is the block after the model's own: one of the model's layers that attend, with gates
beside the queries, which reads the state after the model's final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, HeadExperts
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.exporters.gguf_reader import (
    GgufFile,
    Metadata,
    first_architecture,
    is_only_mtp,
    main_layers,
)
from edge_spec.exporters.heads.eagle import eagle_shapes, head_config, require_target
from edge_spec.exporters.heads.head_files import (
    GGUF_LAYER,
    FurtherKeys,
    HeadFiles,
    Names,
    Shapes,
    count,
    gguf_values,
    require_shape,
    require_shapes,
    with_weights,
)
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

_LAYER = "layers.0."
_QUERIES, _GATE = _LAYER + "q.weight", _LAYER + "q_gate.weight"
_PARTS = ("gate", "up", "down")
_MAX_EXPERTS = 4096
_EXPERTS = _LAYER + "experts."
_NAMES = Names(  # of which matrices of all experts are one tensor
    {
        "nextn.enorm.weight": "embed_norm",
        "nextn.hnorm.weight": "state_norm",
        "nextn.eh_proj.weight": "fc.weight",
        "nextn.shared_head_norm.weight": "norm",
        "nextn.shared_head_head.weight": "head",
        "nextn.embed_tokens.weight": "embed",
    },
    {
        **GGUF_LAYER,
        "post_attention_norm.weight": "post_norm",
        "ffn_gate_inp.weight": "router.weight",
        "ffn_gate_inp_shexp.weight": "shared_gate.weight",
        **{f"ffn_{part}_shexp.weight": f"{part}.weight" for part in _PARTS},
        **{f"ffn_{part}_exps.weight": f"experts.{part}.weight" for part in (*_PARTS, "gate_up")},
    },
    layer="",
)
_ARCHITECTURES = ("qwen35", "qwen35moe")  # of GGUF
_SHARED_SIZE = "shared_expert_intermediate_size"
_KEYS: FurtherKeys = {_SHARED_SIZE: ("expert_shared_feed_forward_length", int)}  # of GGUF


def _read(files: HeadFiles, names: Names) -> EagleHead:
    """Raises as `open_head` does."""
    path, values, target = files.path, files.values, files.target
    experts = _stated_experts(path, values)
    named = names.rename(path, files.tensors)
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
        experts=experts,
    )
    require_target(head, named, values, target)
    num_layers = values.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers != target.num_layers:
        raise UsageError(
            f"{path} has the layer for multi-token prediction of another target: its model has "
            f"{num_layers} layers, this target {target.num_layers}",
            remedy="Use it with its own model.",
        )
    named |= _with_gates(head, named, names.theirs[_QUERIES])
    shapes = eagle_shapes(head, {*named})
    if experts is not None:
        shapes |= _expert_shapes(head.config, experts, f"{_EXPERTS}gate_up.weight" in named)
    require_shapes(path, names, named, shapes)
    if experts is not None:
        named = dict(_each_expert(named, experts))
    return with_weights(head, files, named)


def _stated_experts(path: Path, values: Mapping[str, Any]) -> HeadExperts | None:
    """Raises ModelFileError for counts that no head has."""
    if not values.get("num_experts"):
        return None
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    found = HeadExperts(*(count(path, values, key) for key in keys))
    if not found.used <= found.count <= _MAX_EXPERTS:
        raise damaged(f"{path} takes {found.used} of {found.count} experts")
    return found


def _expert_shapes(config: ModelConfig, experts: HeadExperts, has_joined_rows: bool) -> Shapes:
    """has_joined_rows: of gate and up."""
    hidden, count, size = config.hidden_size, experts.count, experts.size
    rows = {"gate_up": 2 * size} if has_joined_rows else {"gate": size, "up": size}
    return {
        _LAYER + "router.weight": (count, hidden),
        _LAYER + "shared_gate.weight": (1, hidden),
        **{f"{_EXPERTS}{part}.weight": (count, each, hidden) for part, each in rows.items()},
        _EXPERTS + "down.weight": (count, hidden, size),
    }


def _each_expert(
    named: Mapping[str, StoredTensor], experts: HeadExperts
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors, those of each expert apart."""
    for name, tensor in named.items():
        if not name.startswith(_EXPERTS):
            yield name, tensor
            continue
        whole = name.removeprefix(_EXPERTS).removesuffix(".weight")
        parts = {whole: slice(None)}
        if whole == "gate_up":
            parts = {"gate": slice(experts.size), "up": slice(experts.size, None)}
        for expert, data in enumerate(tensor.data):
            own = replace(tensor, shape=tensor.shape[1:], data=data)
            for part, rows in parts.items():
                yield f"{_EXPERTS}{expert}.{part}.weight", own.rows(rows)


def _with_gates(
    head: EagleHead, named: Mapping[str, StoredTensor], queries: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields queries and their gates apart: in the rows of each head of queries follow those of its
    gate. queries: what files call them. Raises ModelFileError for a matrix of another shape."""
    config, stored = head.config, named.get(_QUERIES)
    expected = (2 * config.query_size, config.hidden_size)
    require_shape(head.path, queries, stored, expected)
    assert stored is not None
    rows = np.arange(expected[0]).reshape(config.num_heads, 2, config.head_dim)
    for name, order in ((_QUERIES, rows[:, 0].ravel()), (_GATE, rows[:, 1].ravel())):
        yield name, stored.in_order(order)


def is_gguf_head(path: Path, is_targets: bool) -> bool:
    """Returns whether this file has such a layer and no more of a model. is_targets: it is the
    target's own file, of which the model itself is no draft."""
    if first_architecture(path) not in _ARCHITECTURES:
        return False
    try:
        file = GgufFile(path)
        first = main_layers(Metadata(file.metadata, path))
    except ModelFileError:
        return False  # whoever opens it as a model says what is wrong
    return first is not None and (is_targets or is_only_mtp(file.tensors))


def gguf_head(path: Path, target: ModelConfig, has_weights: bool) -> EagleHead:
    """Raises as `open_head` does."""
    file = GgufFile(path)
    metadata = Metadata(file.metadata, path)
    first = main_layers(metadata)
    names = replace(_NAMES, prefix=f"blk.{first}.")
    if first is None or not any(name.startswith(names.prefix) for name in file.tensors):
        raise ModelFileError(
            f"{path} has no layer for multi-token prediction",
            remedy="Convert the model again, without --no-mtp, or use it without --draft.",
        )
    values = gguf_values(file, target, _KEYS) | {"num_hidden_layers": first}
    values["intermediate_size"] = values.get(_SHARED_SIZE, values["intermediate_size"])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    files = HeadFiles(path, values, file.tensors, target, has_weights)
    return _read(files, names)
