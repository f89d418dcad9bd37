"""Read EAGLE heads (SafeAILab, speculators, SpecForge), and DFlash and DSpark heads (z-lab,
SpecForge, Liquid AI, DeepSpec, speculators). Authors differ in names and counts, and in where
config.json has them. GGUF metadata is translated to its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import (
    Confidence,
    DFlashHead,
    EagleHead,
    MaskedRows,
    Transitions,
)
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.gguf_reader import EAGLE3, GgufFile, Metadata
from edge_spec.exporters.heads.head_files import (
    GGUF,
    HF,
    WHOLE,
    Form,
    FurtherKeys,
    HeadFiles,
    Names,
    Part,
    Shapes,
    count,
    feature_layers,
    gguf_values,
    head_shapes,
    mapping,
    mask_token,
    not_computed,
    other_target,
    parts,
    require_shape,
    require_shapes,
    scored_tokens,
    unusable,
    with_weights,
)
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

VOCABULARY = ("d2t", "t2d")  # the scored tokens; the same as a mask
_MASKED = "mask_hidden"  # [..., features] of a masked token
# Only training uses these.
_TARGETS = ("verifier_norm.weight", "verifier_lm_head.weight")
_EAGLE_PARTS = parts("""
    bias      fc.bias         fc         fc               hidden
    fc_norm   fc_norm         input_norm enc.output_norm  joined
""")
_FEATURE_NORMS = tuple(
    Part("features", f"feature_norm.{each}", (f"fc_norm.{each}.weight", ""), ("feature",))
    for each in range(10)
)


def _eagle3(num_features: int = len(_FEATURE_NORMS)) -> Form:
    return Form(
        "fc norm bias? fc_norm? features? embed? head?",
        "layer input hidden norms? biases?",
        "layer input norms? biases?",
        (*WHOLE, *_EAGLE_PARTS, *_FEATURE_NORMS[:num_features]),
    )


# Its first layer has no input norm.
_EAGLE1 = Form(
    "fc bias? embed? head?",
    "layer norms? biases?",
    "layer input norms? biases?",
    (*WHOLE, *_EAGLE_PARTS),
)
_IGNORED = (*VOCABULARY, *_TARGETS, _MASKED, "rotary_emb.inv_freq")
EAGLE_NAMES = _eagle3().names(HF, ignored=_IGNORED)
EAGLE_GGUF_NAMES = _eagle3().names(GGUF, layer="blk.{}.", ignored=_IGNORED)
_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # config.json's names of the mask token
_COUNT, _MAX_COUNT = 8, 64  # drafted tokens: by default, as heads are trained, and at most
_PADDING = 512  # rows: tables of one vocabulary differ by no more, padded or not


def eagle_head(files: HeadFiles, names: Names = EAGLE_NAMES) -> EagleHead:
    path, values, target = files.path, files.values, files.target
    sizes = {**values, **mapping(values, "transformer_layer_config")}
    tensors = without_prefixes(files.tensors)
    named, masked = names.rename(path, tensors), tensors.get(_MASKED)
    marks = named.keys() | tensors.keys()
    reads_beside = not marks.isdisjoint({"layers.0.hidden_norm", "norm", *VOCABULARY})
    ids = scored_tokens(files)
    head = EagleHead(
        kind=("EAGLE-3" if masked is None else "P-EAGLE") if reads_beside else "EAGLE-1",
        path=path,
        config=head_config(path, sizes, named, target),
        feature_layers=_eagle_layers(files) if reads_beside else (target.num_layers,),
        feature_size=target.hidden_size,
        tensors={},
        joins_embedding=not reads_beside,
        adds_to_normed=bool(values.get("norm_before_residual", False)),
        returns_normed=bool(values.get("norm_output", False)),
        token_ids=ids,
        window=head_window(path, sizes),
    )
    require_target(head, named, sizes, target)
    # Require the norms that config.json asks for; without them a head silently drafts worse.
    options = {"norm_before_fc": "fc_norm", "fc_norm": "feature_norm.0"}
    asked = {name for option, name in options.items() if values.get(option) is True}
    form = _eagle3(len(head.feature_layers)) if reads_beside else _EAGLE1
    shapes = head_shapes(form, head, named.keys() | asked)
    require_shapes(path, names, named, shapes)
    return with_weights(replace(head, masks=_masked_rows(head, values, masked)), files, named)


def without_prefixes(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Strip prefixes that some formats add to names."""
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): each
        for name, each in tensors.items()
    }


def _eagle_layers(files: HeadFiles) -> tuple[int, ...]:
    """Return the feature layers; by default the 3rd, the middle, the 3rd from the end."""
    values, num_layers = files.values, files.target.num_layers
    key = "eagle_aux_hidden_state_layer_ids"
    outputs = mapping(values, "eagle_config").get(key)
    if outputs is not None:
        return feature_layers(files.path, outputs, files.target, are_outputs=True)
    ids = values.get(key)
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    return feature_layers(files.path, ids, files.target, are_outputs=False)


def _masked_rows(
    head: EagleHead, values: Mapping[str, Any], stored: StoredTensor | None
) -> MaskedRows | None:
    """Return None for a head that drafts token by token. Raises ModelFileError if a parallel head
    lacks a part, UsageError for a mask token beyond the target's."""
    stated = mapping(values, "speculators_config")
    if stored is None:
        kinds = (values.get("speculators_model_type"), stated.get("algorithm"))
        if values.get("parallel_drafting") or "peagle" in kinds:
            raise damaged(
                f"{head.path} drafts several tokens in one pass, but tensor {_MASKED} is missing"
            )
        return None
    size = len(head.feature_layers) * head.feature_size
    if math.prod(stored.shape) != size:
        require_shape(head.path, _MASKED, stored, (size,))
    name = next((each for each in _TOKENS if values.get(each) is not None), _TOKENS[0])
    token = mask_token(head.path, values, name, head.config.vocab_size)
    methods = stated.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    told = first if isinstance(first, dict) else values
    num_tokens = min(count(head.path, told, "speculative_tokens", _COUNT), _MAX_COUNT)
    return MaskedRows(token, stored.float32().reshape(-1), num_tokens)


def head_config(
    path: Path,
    sizes: Mapping[str, Any],
    named: Mapping[str, StoredTensor],
    target: ModelConfig,
    architecture: str = "eagle",
) -> ModelConfig:
    """Raises ModelFileError for invalid sizes, UnsupportedModelError for unsupported features."""
    stated = StatedConfig(sizes, path / "config.json")
    heads = count(path, sizes, "num_attention_heads")
    try:
        rope, rotary_dim = stated.rope(), stated.rotary_dim
        epsilon, head_dim = float(sizes.get("rms_norm_eps", 1e-6)), stated.head_dim
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise unusable(path, f"valid value: {error}") from None
    if sizes.get("hidden_act", "silu") != "silu":
        raise not_computed(
            f"{path} has an activation other than silu, which is not computed for trained heads"
        )
    config = ModelConfig(
        architecture=architecture,
        num_layers=1
        + max((int(name.split(".")[1]) for name in named if "layers." in name), default=0),
        hidden_size=count(path, sizes, "hidden_size"),
        intermediate_size=count(path, sizes, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=count(path, sizes, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        norm_epsilon=epsilon,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rotary_dim,
        qk_norm="layers.0.q_norm" in named,
        qkv_bias="layers.0.q.bias" in named,
    )
    for name, valid in (
        ("rms_norm_eps", 0 <= epsilon < 1),
        ("rope_theta", 1 < rope.theta < float("inf")),
        ("head_dim", head_dim > 0 and head_dim % 2 == 0),
        ("partial_rotary_factor", 0 < config.rotated <= head_dim and config.rotated % 2 == 0),
        ("num_key_value_heads", heads % config.num_kv_heads == 0),
    ):
        if not valid:
            raise unusable(path, f"usable {name}")
    return config


def head_window(path: Path, sizes: Mapping[str, Any]) -> int | None:
    """Return the sliding window, in tokens. Raises UnsupportedModelError if only some layers have
    one."""
    window, kinds = sizes.get("sliding_window"), sizes.get("layer_types")
    if window is None or sizes.get("use_sliding_window") is False:
        return None
    sliding = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else [True]
    if any(sliding) and not all(sliding):
        raise not_computed(
            f"{path} has a sliding window in some of its layers, which is not computed for heads"
        )
    return count(path, sizes, "sliding_window") if any(sliding) else None


def require_target(
    head: EagleHead | DFlashHead,
    named: Mapping[str, StoredTensor],
    sizes: Mapping[str, Any],
    target: ModelConfig,
) -> None:
    """Raises UsageError if the head's target has another width or vocabulary."""
    joined = named["fc.weight"].shape[-1] if "fc.weight" in named else 0
    width, tokens = head.config.hidden_size, sizes.get("vocab_size")
    joins_embedding = isinstance(head, EagleHead) and head.joins_embedding
    given = target.hidden_size * (2 if joins_embedding else len(head.feature_layers))
    told = None
    if isinstance(head, EagleHead) and joined not in (0, given):
        told = f"it reads {joined} numbers of a token, this target gives {given}"
    elif isinstance(tokens, int) and abs(tokens - target.vocab_size) > _PADDING:
        told = f"its vocabulary has {tokens} tokens, this target's {target.vocab_size}"
    elif width != target.hidden_size and not {"embed", "head"} <= named.keys():
        told = f"it shares tables of {width} numbers a row, this target's have {target.hidden_size}"
    if told is not None:
        raise other_target(f"{head.path} is a head for another target: {told}")


_MAX_BLOCK = 64  # tokens
_INPUT_IDS, _OUTPUT_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"
# config.json keys that only these heads have.
DFLASH_MARKS = ("dflash_config", "markov_rank", _INPUT_IDS, _OUTPUT_IDS)
_PROJECTORS = (None, "dflash", "dspark")
# Options that are not supported.
_OTHERWISE = (
    "is_causal",
    "causal",
    "use_swa",
    "conv_kernel_size",
    "selector_rank",
    "attention_value_scale",
    "output_multiplier",
    "input_embedding_scale",
    "final_logit_softcapping",
)
_AFTER, _SCORED, _CONFIDENCE = "markov.after", "markov.scored", "confidence"
_VANILLA = "vanilla"  # transitions that depend on the token before alone
# DSpark's parts, by speculators' names and, last, DeepSpec's.
_DFLASH = Form(
    "fc norm context embed? head? markov? confidence?",
    "layer input norms",
    "layer input norms",
    (
        *WHOLE,
        *parts("""
    context     context_norm       hidden_norm            enc.output_norm  hidden
    markov      markov.after       markov_w1              markov_w1        vocab,rank
    markov      markov.scored      markov_w2              markov_w2        scored,rank
    confidence  confidence.weight  confidence_proj        conf_proj        one,read_confidence
    confidence  confidence.bias    confidence_proj        conf_proj        one
    markov      markov.after       markov_head.markov_w1  -                vocab,rank
    markov      markov.scored      markov_head.markov_w2  -                scored,rank
    confidence  confidence.weight  confidence_head.proj   -                one,read_confidence
    confidence  confidence.bias    confidence_head.proj   -                one
"""),
    ),
)
DFLASH_NAMES = _DFLASH.names(HF, ignored=_IGNORED)
DFLASH_GGUF_NAMES = _DFLASH.names(GGUF, layer="blk.{}.", ignored=_IGNORED)


def dflash_head(files: HeadFiles, names: Names = DFLASH_NAMES) -> DFlashHead:
    path, target, top = files.path, files.target, files.values
    values = {**top, **mapping(top, "dflash_config")}
    sizes = {**top, **mapping(top, "transformer_layer_config")}
    tensors = without_prefixes(files.tensors)
    has_markov = any("markov_w1" in name for name in tensors)
    _require_computed(path, values, has_markov)
    named = names.rename(path, tensors)
    config = head_config(path, sizes, named, target, "dflash")
    if head_window(path, sizes) is not None:
        raise not_computed(f"{path} has a sliding window, which is not computed for DFlash heads")
    scores_next = _scores_next(values, has_markov)
    size, least = count(path, values, "block_size"), 1 if scores_next else 2
    if not least <= size <= _MAX_BLOCK:
        raise unusable(path, f"usable block_size: it is {size}, expected {least} to {_MAX_BLOCK}")
    head = DFlashHead(
        path=path,
        config=config,
        feature_layers=_dflash_layers(path, values, target),
        feature_size=target.hidden_size,
        tensors={},
        block_size=size,
        mask_token=mask_token(path, values, "mask_token_id", target.vocab_size),
        scores_next=scores_next,
        token_ids=scored_tokens(files),
    )
    require_target(head, named, sizes, target)
    require_shapes(path, names, named, _dflash_shapes(head, named, values))
    head = replace(
        head,
        transitions=_transitions(named) if has_markov else None,
        confidence=_confidence(named) if f"{_CONFIDENCE}.weight" in named else None,
    )
    own = ("markov.", f"{_CONFIDENCE}.")
    layers = {name: each for name, each in named.items() if not name.startswith(own)}
    return with_weights(head, files, layers)


def _require_computed(path: Path, values: Mapping[str, Any], has_markov: bool) -> None:
    """Raises UnsupportedModelError. Comes before names, of which other kinds have further ones."""
    kind = values.get("markov_head_type", _VANILLA)
    if has_markov and kind != _VANILLA:
        told = f"{path} has a Markov head of the kind {str(kind)[:100]}"
        raise not_computed(f"{told}, which is not computed; only {_VANILLA} is")
    projector = values.get("projector_type")
    if projector not in _PROJECTORS:
        told = f"{path} has a projector of the kind {str(projector)[:100]}"
        raise not_computed(f"{told}, which is not computed")
    otherwise = next((each for each in _OTHERWISE if values.get(each)), None)
    if otherwise is not None:
        raise not_computed(f"{path} states {otherwise}, which is not computed for DFlash heads")


def _dflash_layers(path: Path, values: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    depth = values.get("num_target_layers")
    if isinstance(depth, int) and depth != target.num_layers:
        raise other_target(
            f"{path} is a head for a target of {depth} layers, this one has {target.num_layers}"
        )
    if _INPUT_IDS in values:
        return feature_layers(path, values[_INPUT_IDS], target, are_outputs=False)
    return feature_layers(path, values.get(_OUTPUT_IDS), target, are_outputs=True)


def _scores_next(values: Mapping[str, Any], has_transitions: bool) -> bool:
    """Return whether each row scores the token after its own, as in DeepSpec."""
    told = values.get("sample_from_anchor", values.get("shift_label"))
    if isinstance(told, bool):
        return told
    if _INPUT_IDS in values:  # older speculators
        return False
    is_deepspec = "dflash_config" not in values
    return is_deepspec or has_transitions or values.get("projector_type") == "dspark"


def _dflash_shapes(
    head: DFlashHead, named: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> Shapes:
    rank = named[_AFTER].shape[-1] if _AFTER in named else 0
    if values.get("markov_rank"):
        rank = count(head.path, values, "markov_rank")
    asked = {_AFTER} if rank else set()
    if values.get("enable_confidence_head"):
        asked.add(f"{_CONFIDENCE}.weight")
    reads_markov = values.get("confidence_head_with_markov", True)
    read = head.config.hidden_size + (rank if reads_markov else 0)
    present = named.keys() | asked
    return head_shapes(_DFLASH, head, present, rank=rank, read_confidence=read, one=1)


def _transitions(named: Mapping[str, StoredTensor]) -> Transitions:
    after, scored = named[_AFTER], named[_SCORED]
    return Transitions(
        lambda tokens: after.rows(tokens).float32(),
        lambda tokens: scored.rows(tokens).float32(),
    )


def _confidence(named: Mapping[str, StoredTensor]) -> Confidence:
    weight, bias = (named[f"{_CONFIDENCE}.{end}"].float32() for end in ("weight", "bias"))
    return Confidence(weight[0], float(bias[0]))


_GGUF_KEYS: FurtherKeys = {
    "vocab_size": ("vocab_size", int),
    "block_size": ("block_size", int),
    "sample_from_anchor": ("sample_from_anchor", bool),
    "norm_before_residual": ("norm_before_residual", bool),
    "norm_before_fc": ("norm_before_fc", bool),
    "is_causal": ("attention.causal", bool),
    "hidden_act": ("hidden_activation", str),
    "selector_rank": ("selector_rank", int),
    "attention_value_scale": ("attention.value_scale", float),
    "output_multiplier": ("logit_scale", float),
    "input_embedding_scale": ("embedding_scale", float),
}


def trained_gguf_head(path: Path, target: ModelConfig, has_weights: bool) -> EagleHead | DFlashHead:
    file = GgufFile(path)
    metadata, tensors = Metadata(file.metadata, path), dict(file.tensors)
    architecture = metadata.require("general.architecture", str)
    values = gguf_values(file, target, _GGUF_KEYS)
    ids = tensors.get("d2t")  # token IDs in GGUF, not offsets
    if ids is not None and len(ids.shape) == 1 and ids.data.nbytes == 8 * ids.shape[0]:
        offsets = np.frombuffer(ids.data.tobytes(), np.int64) - np.arange(ids.shape[0])
        tensors["d2t"] = replace(ids, data=offsets.view(np.uint8))
        values["draft_vocab_size"] = ids.shape[0]
    values |= _layers_and_mask(metadata, architecture)
    files = HeadFiles(path, values, tensors, target, has_weights)
    if architecture == EAGLE3:
        return eagle_head(files, EAGLE_GGUF_NAMES)
    return dflash_head(files, DFLASH_GGUF_NAMES)


def _layers_and_mask(metadata: Metadata, architecture: str) -> dict[str, Any]:
    stored = np.asarray(metadata.values.get(f"{architecture}.target_layers", ()))
    if stored.dtype.kind not in "iu" or stored.ndim != 1:
        raise damaged(f"{metadata.path} names no layers")
    inputs = stored.tolist()
    if architecture == EAGLE3:
        # Rows of q and k are interleaved pairs, as in all Llama-like models.
        return {"eagle_aux_hidden_state_layer_ids": inputs, "rope_is_neox_style": False}
    # As in llama.cpp, a block with transitions scores next tokens by default.
    mask = metadata.get("tokenizer.ggml.mask_token_id", int)
    stated = {"mask_token_id": mask, "target_layer_ids": [each - 1 for each in inputs]}
    return {"dflash_config": stated}
