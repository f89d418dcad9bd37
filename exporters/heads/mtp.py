"""The layer for multi-token prediction (MTP) in a model's own files, read as a head for it: as
DeepSeek-V3 and GLM-4.5 name it, and as MiMo does, which joins state and embedding the other way
round (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

Qwen 3.5's is `mtp.*` of a model's directory, and what llama.cpp's converter makes of it, the block
after the model's own in a GGUF file. It is one of the model's layers that attend, with gates beside
the queries, and reads the state after the model's final norm. Norms of a directory have 1 taken
away, those of GGUF have not.

Layers with DeepSeek's experts or its latent attention are refused by the names of their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, HeadExperts
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.families.family import raised
from edge_spec.exporters.gguf_reader import (
    GgufFile,
    Metadata,
    first_architecture,
    is_only_mtp,
    main_layers,
)
from edge_spec.exporters.heads.eagle import head_config, require_target
from edge_spec.exporters.heads.head_files import (
    GGUF,
    HF,
    LAYER,
    Form,
    FurtherKeys,
    HeadFiles,
    Names,
    count,
    gguf_values,
    head_shapes,
    mapping,
    parts,
    require_shape,
    require_shapes,
    with_weights,
)
from edge_spec.exporters.hf_source import MIMO_PREFIX, mtp_prefix
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

MTP_PREFIX = "mtp."  # as Qwen3-Next and Qwen 3.5 have it, beside layers with a recurrent state
_LAYER = "layers.0."
_QUERIES, _GATE = _LAYER + "q.weight", _LAYER + "q_gate.weight"
_PARTS = ("gate", "up", "down")
_MAX_EXPERTS = 4096
_EXPERTS = _LAYER + "experts."
_EVERY_EXPERT = re.compile(re.escape(_EXPERTS) + r"([a-z_]+)\.weight")
_FORM = Form(
    "fc norm inputs embed? head?",
    "layer input norms? biases? gate?",
    "",
    # Qwen 3.5's directories, and GGUF.
    parts("""
    fc      fc.weight   fc                     nextn.eh_proj           hidden,joined
    norm    norm        norm                   nextn.shared_head_norm  hidden
    inputs  embed_norm  pre_fc_norm_embedding  nextn.enorm             hidden
    inputs  state_norm  pre_fc_norm_hidden     nextn.hnorm             hidden
    embed   embed       -                      nextn.embed_tokens      vocab,hidden
    head    head        -                      nextn.shared_head_head  scored,hidden
"""),
    # Matrices of all experts are in one tensor, or each apart; `_read` knows their shapes.
    (
        *LAYER,
        *parts("""
    layer    post_norm               -                            post_attention_norm  hidden
    layer    gate.weight             mlp.shared_expert.gate_proj  ffn_gate_shexp       inner,hidden
    layer    up.weight               mlp.shared_expert.up_proj    ffn_up_shexp         inner,hidden
    layer    down.weight             mlp.shared_expert.down_proj  ffn_down_shexp       hidden,inner
    experts  router.weight           mlp.gate                     ffn_gate_inp         count,hidden
    experts  shared_gate.weight      mlp.shared_expert_gate       ffn_gate_inp_shexp   one,hidden
    every    experts.gate.weight     -                            ffn_gate_exps        -
    every    experts.up.weight       -                            ffn_up_exps          -
    every    experts.gate_up.weight  mlp.experts.gate_up_proj!    ffn_gate_up_exps     -
    every    experts.down.weight     mlp.experts.down_proj!       ffn_down_exps        -
"""),
    ),
)
_QWEN35 = _FORM.names(HF, layer=_LAYER, prefix=MTP_PREFIX)
# DeepSeek's and MiMo's directories, whose layers have no number of their own.
_DEEPSEEK, _MIMO = range(2)
_NUMBERLESS = replace(
    _FORM,
    parts=parts("""
    fc      fc.weight   eh_proj           input_proj        hidden,joined
    norm    norm        shared_head.norm  final_layernorm   hidden
    inputs  embed_norm  enorm             token_layernorm   hidden
    inputs  state_norm  hnorm             hidden_layernorm  hidden
    embed   embed       embed_tokens      -                 vocab,hidden
    head    head        shared_head.head  -                 scored,hidden
"""),
    layer_parts=LAYER,
)
_ARCHITECTURES = ("qwen35", "qwen35moe")  # of GGUF
_NO_RETURN = ("qwen3_next",)  # model types with the same names, whose states are not taken back
_ROTATED = "partial_rotary_factor"
_DEFAULTS = {"head_dim": 256, _ROTATED: 0.25}  # of config.json
_SHARED_SIZE = "shared_expert_intermediate_size"
_KEYS: FurtherKeys = {_SHARED_SIZE: ("expert_shared_feed_forward_length", int)}  # of GGUF


def mtp_head(files: HeadFiles) -> EagleHead:
    """Raises as `open_head` does."""
    prefix = mtp_prefix(files.values, files.tensors)
    if prefix is None:
        raise ModelFileError(
            f"{files.path} states layers for multi-token prediction, and has none",
            remedy="Download the model again, or use it without them.",
        )
    column = _MIMO if prefix == MIMO_PREFIX else _DEEPSEEK
    head, named = _read(files, _NUMBERLESS.names(column, HF, layer="", prefix=prefix))
    if column == _MIMO:
        named["fc.weight"] = _with_embedding_first(named["fc.weight"])
    return with_weights(head, files, named)


def _with_embedding_first(stored: StoredTensor) -> StoredTensor:
    """Returns a matrix that joins the state and then the embedding with its halves in each other's
    places."""

    def read(rows: slice | np.ndarray) -> np.ndarray:
        found = stored.rows(rows).stored_rows()
        return np.roll(found, found.shape[1] // 2, axis=1)

    return replace(stored, read_rows=read)


def _read(
    files: HeadFiles, names: Names, experts: HeadExperts | None = None, has_gates: bool = False
) -> tuple[EagleHead, dict[str, StoredTensor]]:
    """Returns the first of a model's layers, without its tensors, and these by our names.
    has_gates: beside its queries. Raises as `open_head` does."""
    path, values, target = files.path, files.values, files.target
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
    if has_gates:
        named |= _with_gates(head, named, names.theirs[_QUERIES])
    if experts is None:
        shapes = head_shapes(_FORM, head, named)
    else:
        named = dict(_each_expert(named))
        form = replace(_FORM, first=f"{_FORM.first} experts")
        shapes = head_shapes(form, head, named, one=1, count=experts.count)
        size, hidden = experts.size, head.config.hidden_size
        of_parts = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
        for part, shape in of_parts.items():
            whole = f"{_EXPERTS}{part}.weight"
            apart = [f"{_EXPERTS}{expert}.{part}.weight" for expert in range(experts.count)]
            if whole in names.theirs and named.keys().isdisjoint(apart):
                shapes[whole] = (experts.count, *shape)  # missing: name one
            else:
                shapes |= dict.fromkeys(apart, shape)
    require_shapes(path, names, named, shapes)
    return head, named


def _stated_experts(path: Path, values: Mapping[str, Any]) -> HeadExperts | None:
    """Raises ModelFileError for counts that no head has."""
    if not values.get("num_experts"):
        return None
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    found = HeadExperts(*(count(path, values, key) for key in keys))
    if not found.used <= found.count <= _MAX_EXPERTS:
        raise damaged(f"{path} takes {found.used} of {found.count} experts")
    return found


def _each_expert(named: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors, those of each expert apart."""
    for name, tensor in named.items():
        every = _EVERY_EXPERT.fullmatch(name)
        if every is None or len(tensor.shape) != 3:
            yield name, tensor
            continue
        parts_of = {every[1]: slice(None)}
        if every[1] == "gate_up":
            half = tensor.shape[1] // 2
            parts_of = {"gate": slice(half), "up": slice(half, None)}
        for expert, data in enumerate(tensor.data):
            own = replace(tensor, shape=tensor.shape[1:], data=data)
            for part, rows in parts_of.items():
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


def first_tensor(names: Iterable[str]) -> str | None:
    """Returns the name of a tensor of Qwen 3.5's layer, where a directory has any."""
    return next((name for name in names if name.startswith(MTP_PREFIX)), None)


def directory_head(files: HeadFiles) -> EagleHead:
    """Raises as `open_head` does."""
    path, values = files.path, files.values
    text = {**_DEFAULTS, **values, **mapping(values, "text_config")}
    rope = mapping(text, "rope_parameters")
    text[_ROTATED] = rope.get(_ROTATED, text[_ROTATED])
    if text.get("num_experts"):
        text["intermediate_size"] = text.get(_SHARED_SIZE)
    if values.get("model_type") in _NO_RETURN:
        raise UnsupportedModelError(
            f"{path} has a layer for multi-token prediction "
            f"({str(first_tensor(files.tensors))[:100]}) of a {values['model_type']} model: "
            "llama.cpp, where alone such models run, does not take back their recurrent "
            "states, as rejected draft tokens need it",
            remedy="Use a model of attention alone, or Qwen 3.5.",
        )
    experts = _stated_experts(path, text)
    each = {
        f"mlp.experts.{expert}.{part}_proj.weight": f"experts.{expert}.{part}.weight"
        for expert in range(experts.count if experts else 0)
        for part in _PARTS
    }
    names = replace(_QWEN35, of_layers={**each, **_QWEN35.of_layers})
    layers, first = MTP_PREFIX + "layers.", MTP_PREFIX + _LAYER
    tensors = {
        name: tensor
        for name, tensor in files.tensors.items()
        if name.startswith(first) or not name.startswith(layers)
    }
    own = replace(files, values=text, tensors=tensors)
    head, named = _read(own, names, experts, has_gates=True)
    named |= {name: raised(named[name], 1.0) for name in named if name.endswith("norm")}
    return with_weights(head, own, named)


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
    names = _FORM.names(GGUF, layer="", prefix=f"blk.{first}.")
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
    head, named = _read(files, names, _stated_experts(path, values), has_gates=True)
    return with_weights(head, files, named)
