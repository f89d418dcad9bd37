"""Declares what is asked of a training, checks it before anything takes long, and says what each
kind of drafter reads and how it begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import DEFAULT_TEMPLATE, ModelInfo
from edge_spec.diagnostics.report_files import require_writable
from edge_spec.errors import MissingDependencyError, UnsupportedModelError, UsageError
from edge_spec.models.asked_options import option

_SHARE_SCORED, _LEAST_SCORED = 50, 4096


@dataclass(frozen=True)
class DistillRequest:
    """Declares the options of `edge-spec distill`.

    Raises UsageError for options that do not go together and for an `out` that cannot be written,
    MissingDependencyError without PyTorch."""

    out: Path | None = option(
        None, "Directory of the drafter; without it, the cache, where the model finds it by itself."
    )
    kind: str = option("medusa", "medusa, eagle3 or draft.")
    prompts: Path | None = option(
        None,
        "What the model answers: JSON lines with id, category, and prompt or turns, or a .txt "
        "with a prompt a line; without it, what the model asks itself or, where its name has "
        "`code` in it, tasks of ours.",
    )
    num_tokens: int = option(300_000, "Of answers to learn from.", flag="--tokens", least=1)
    max_tokens: int = option(256, "Most tokens of an answer.", least=4)
    vocabulary: int | None = option(
        None,
        "Tokens that the drafter scores: those the model writes most.  [default: as many as "
        "have a fiftieth of the model's parameters]",
        least=2,
    )
    positions: int = option(3, "Draft tokens of a round that it is trained for.", least=1, most=8)
    epochs: int | None = option(
        None, "Most passes over the answers.  [default: medusa 8, eagle3 and draft 6]", least=1
    )
    layers: int | None = option(
        None, "Of an ordinary draft.  [default: one for seven of the model's]"
    )
    ray: str | None = option(
        None,
        "HOST:PORT of a Ray cluster: its machines write answers and read features.",
        metavar="ADDRESS",
    )
    max_cache_mb: int = option(
        8000,
        "MB on the disk for what the model computes of the answers.",
        flag="--max-cache",
        least=1,
    )
    seed: int = option(0, "Of all that is drawn.", least=0)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"there is no drafter of the kind {self.kind}", remedy=f"Use {', '.join(KINDS)}."
            )
        if self.layers is not None and self.kind != "draft":
            raise UsageError("--layers is for --kind draft", remedy="Leave it out.")
        if self.out is not None:
            if self.out.exists() or self.out.is_symlink():
                remedy = "Remove it, or give another --out."
                raise UsageError(f"{self.out} exists already", remedy=remedy)
            require_writable(self.out.parent)
        require_torch()
        if self.ray is not None and find_spec("ray") is None:
            raise MissingDependencyError(
                "--ray needs Ray, which is not installed",
                remedy='Run: pip install "edge-spec[ray]".',
            )


def require_torch() -> None:
    """Raises MissingDependencyError without PyTorch."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "a drafter is trained with PyTorch, which is not installed",
            remedy='Run: pip install "edge-spec[distill]".',
        )


def default_scored(config: ModelConfig) -> int:
    """Returns how many tokens a drafter scores. Their rows are read for each draft token, so a
    small model has few of them. A multiple of 1,024, of which processors are fond."""
    rows = config.num_parameters // (_SHARE_SCORED * config.hidden_size)
    return max(_LEAST_SCORED, rows // 1024 * 1024)


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FACTORS = "factors"  # of frequencies one by one, as GGUF files hold them
_SHARE = 7  # layers of the target for each of the draft


def num_kept(config: ModelConfig, asked: int | None) -> int:
    """Returns how many layers a draft has. Raises UsageError for as many as its target has, and
    UnsupportedModelError for a target of which no draft is made."""
    if config.features() or config.num_experts or config.architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"a small draft has layers like Llama's or Qwen's, and those of "
            f"{config.architecture} are of another form",
            remedy="Use --kind medusa.",
        )
    if config.rope_scaling is not None and config.rope_scaling.kind == FACTORS:
        raise UnsupportedModelError(
            "the target's file holds its rotary frequencies one by one, which config.json of a "
            "draft cannot",
            remedy="Name the Hugging Face directory that the file was made from.",
        )
    count = max(2, round(config.num_layers / _SHARE)) if asked is None else asked
    if not 1 <= count < config.num_layers:
        raise UsageError(
            f"a draft of {count} layers is not smaller than its target, which has "
            f"{config.num_layers}",
            remedy=f"Give --layers, 1 to {config.num_layers - 1}, or use --kind medusa.",
        )
    return count


def kept_layers(num_layers: int, count: int) -> dict[int, int]:
    """Layers of the target -> their numbers in the draft: the last one, and others as far from
    each other, from the first one on (of one layer, the last)."""
    chosen = np.linspace(num_layers - 1, 0, count).round().astype(int)[::-1]
    return {int(layer): index for index, layer in enumerate(chosen)}


def layers_config(config: ModelConfig, architecture: str, num_layers: int) -> dict[str, Any]:
    """What config.json says of layers like the target's, with the values of its architecture."""
    told: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
    }
    scaling = stated_scaling(config)
    return told if scaling is None else {**told, "rope_scaling": scaling}


def draft_config(source: ModelInfo, num_layers: int) -> dict[str, Any]:
    config = source.config
    told = layers_config(config, config.architecture, num_layers) | {
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.output_bias,
        "torch_dtype": "float16",
    }
    if config.architecture == "mistral":
        told["sliding_window"] = None  # transformers would take 4096
    if source.eos_ids:
        told["eos_token_id"] = list(source.eos_ids)
    if source.bos_id is not None:
        told["bos_token_id"] = source.bos_id
    return told


def text_files(source: ModelInfo) -> Mapping[str, str]:
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.adds_bos,
    }
    told |= {name: token or None for name, token in source.special_tokens.items()}
    if source.chat_template is not None:
        templates = {DEFAULT_TEMPLATE: source.chat_template, **source.named_templates}
        told["chat_template"] = (
            [{"name": name, "template": each} for name, each in templates.items()]
            if source.named_templates
            else source.chat_template
        )
    return {
        "tokenizer.json": source.tokenizer_json(),
        "tokenizer_config.json": json.dumps(told, indent=2),
    }


def stated_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """Returns the scaling as config.json states it; None where there is none, or one that it has no
    words for."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == FACTORS:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }


@dataclass(frozen=True)
class Kind:
    """drafter: its name in `--drafter`. layers: the features that it reads, the last of them the
    state after the target's final norm, which its teacher is made of. of_answers: whether it reads
    those of prompts, too. require: raises an EdgeSpecError for a target of which none can be made.
    of_layers: whether it begins as layers of a Checkpoint; else TensorRows are enough.
    scores_all: whether it drafts from the whole vocabulary."""

    drafter: str
    layers: Callable[[ModelConfig], tuple[int, ...]]
    of_answers: bool
    rate: float
    epochs: int
    rows: int  # of a step
    require: Callable[[ModelConfig, DistillRequest], object]
    of_layers: bool = True
    scores_all: bool = False


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """Inputs of the layers that SafeAILab's code reads. Raises UnsupportedModelError for a target
    of so few that they are not three."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise UnsupportedModelError(
            f"a head of the kind eagle3 reads three layers, and {num_layers} are too few",
            remedy="Use --kind medusa.",
        )
    return layers


def _require_eagle3(config: ModelConfig, request: DistillRequest) -> None:
    eagle3_layers(config.num_layers)
    is_dense = config.num_experts == 0 and config.gated_mlp and config.activation == "silu"
    if not is_dense or config.norm_places != "before" or config.qk_norm:
        raise UnsupportedModelError(
            f"a head of the kind eagle3 begins as a layer of its target, and those of "
            f"{config.architecture} are of another form",
            remedy="Use --kind medusa.",
        )


KINDS = {
    "medusa": Kind(
        drafter="medusa",
        layers=lambda config: (config.num_layers,),
        of_answers=True,
        rate=2e-3,
        epochs=8,
        rows=512,
        require=lambda config, request: None,
        of_layers=False,
    ),
    "eagle3": Kind(
        drafter="eagle",
        layers=lambda config: (*eagle3_layers(config.num_layers), config.num_layers),
        of_answers=False,
        rate=3e-4,
        epochs=6,
        rows=1024,
        require=_require_eagle3,
    ),
    "draft": Kind(
        drafter="draft-model",
        layers=lambda config: (config.num_layers,),
        of_answers=False,
        rate=5e-4,
        epochs=6,
        rows=1024,
        require=lambda config, request: num_kept(config, request.layers),
        scores_all=True,
    ),
}
