"""Chooses the files of a repository that make up the model that is meant, and knows smaller models
of its family and heads that were trained for it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.models.hub.client import HubReference

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# Beside the weights; of these, only the first two have to be there.
DESCRIPTION = (
    *(CONFIG, TOKENIZER, "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "special_tokens_map.json"),
)
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of several GGUF files the first of these: Q4_0 is what all runtimes here run or convert as it is,
# Q8_0 nearly the whole model; then by how common they are.
PREFERRED = (
    *("Q4_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K_S", "Q5_K_S", "F16", "BF16", "F32"),
)

_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files of another kind
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHOWN = 12
# Repository of a target -> repository of its draft; of each family the smallest instruct model,
# in the same form (safetensors or GGUF) from the same publisher. What the table says is a
# suggestion: whether the tokens are the same is seen from the files, once they are here.
_FAMILIES = (
    (r"Qwen/Qwen2\.5-(?:1\.5|3|7|14|32|72)B-Instruct(-GGUF)?", r"Qwen/Qwen2.5-0.5B-Instruct\1"),
    (
        r"Qwen/Qwen2\.5-Coder-(?:1\.5|3|7|14|32)B-Instruct(-GGUF)?",
        r"Qwen/Qwen2.5-Coder-0.5B-Instruct\1",
    ),
    (r"Qwen/Qwen3-(?:1\.7|4|8|14|32)B(-GGUF)?", r"Qwen/Qwen3-0.6B\1"),
    (
        r"meta-llama/(?:Meta-)?Llama-3\.(?:1-8B|1-70B|2-3B|3-70B)-Instruct",
        r"meta-llama/Llama-3.2-1B-Instruct",
    ),
    (
        r"(bartowski|unsloth)/(?:Meta-)?Llama-3\.(?:1-8B|1-70B|2-3B|3-70B)-Instruct-GGUF",
        r"\1/Llama-3.2-1B-Instruct-GGUF",
    ),
    (r"HuggingFaceTB/SmolLM2-(?:360M|1\.7B)-Instruct", r"HuggingFaceTB/SmolLM2-135M-Instruct"),
    (
        r"bartowski/SmolLM2-(?:360M|1\.7B)-Instruct-GGUF",
        r"bartowski/SmolLM2-135M-Instruct-GGUF",
    ),
    (r"google/gemma-3-(?:1|4|12|27)b-it", r"google/gemma-3-270m-it"),
    (
        r"google/gemma-3-(?:4|12|27)b-it-qat-q4_0-gguf",
        r"google/gemma-3-1b-it-qat-q4_0-gguf",
    ),
)


# Repository of a target -> repository of a head that was trained for it, with safetensors. What is
# here was found by searching; none of these heads was tried with this version.
_HEADS = (
    (
        r"meta-llama/(?:Meta-)?Llama-3\.1-8B-Instruct",
        r"RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    ),
    (r"Qwen/Qwen3-(4|8|14)B(?:-GGUF)?", r"deepseek-ai/dspark_qwen3_\1b_block7"),
    (r"Qwen/Qwen3-1\.7B(?:-GGUF)?", r"AngelSlim/Qwen3-1.7B_eagle3"),
    (
        r"Qwen/Qwen3-Coder-30B-A3B-Instruct(?:-GGUF)?",
        r"amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE",
    ),
    (r"LiquidAI/(LFM2\.5-(?:1\.2B-Instruct|2\.6B|8B-A1B))(?:-GGUF)?", r"LiquidAI/\1-DSpark"),
    (r"openai/gpt-oss-20b", r"RedHatAI/gpt-oss-20b-speculator.eagle3"),
)


@dataclass(frozen=True)
class ChosenFiles:
    """Files that belong together: one GGUF file, or those of a Hugging Face directory."""

    names: tuple[str, ...]  # as the repository has them, "/" between folders
    # A directory without a tokenizer, which only a trained head needs none of: its config.json
    # tells whether it is one.
    has_to_be_head: bool = False

    @property
    def is_gguf(self) -> bool:
        return self.names[0].lower().endswith(".gguf")


def choose(reference: HubReference, names: Collection[str]) -> ChosenFiles:
    """names: all files that there are. Safetensors where there are any, else a GGUF file.

    Raises UsageError where it is not clear which file is meant, UnsupportedModelError where none
    can be read.
    """
    if reference.file is not None:
        return ChosenFiles((_named(reference, names),))
    weights = _safetensors(names)
    if CONFIG in names and TOKENIZER not in names:
        weights = weights or _only_safetensors(names)
        if weights:
            return ChosenFiles((CONFIG, *weights), has_to_be_head=True)
    if weights and CONFIG in names:
        description = [name for name in DESCRIPTION if name in names]
        description += sorted(filter(_TEMPLATES.fullmatch, names))
        return ChosenFiles((*description, *weights))
    return ChosenFiles((_preferred(reference, names),))


def missing_tokenizer(reference: HubReference) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{reference} has no {TOKENIZER}",
        remedy="Choose a repository that has one, or a GGUF file of the model.",
    )


def _only_safetensors(names: Collection[str]) -> tuple[str, ...]:
    """Weights of another name, as some heads have them."""
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    return tuple(found) if len(found) == 1 else ()


def _named(reference: HubReference, names: Collection[str]) -> str:
    file = reference.file or ""
    if file not in names:
        raise UsageError(
            f"hf:{reference.repository} has no file {file}", remedy=_listed(_models(names))
        )
    if _SPLIT.search(file):
        raise _split(reference, file)
    return file


def _safetensors(names: Collection[str]) -> tuple[str, ...]:
    """The index and all shards, or the single file; nothing where a shard is missing."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if INDEX in names and shards:
        total = int(shards[0][-len("00000.safetensors") :][:5])
        return (INDEX, *shards) if len(shards) == total else ()
    return (SINGLE,) if SINGLE in names else ()


def _preferred(reference: HubReference, names: Collection[str]) -> str:
    models = _models(names)
    whole = [name for name in models if not _SPLIT.search(name)]
    if len(whole) == 1:
        return whole[0]
    for quantization in PREFERRED:
        ending = re.compile(rf"(?:^|[-._/]){quantization}\.gguf$", re.IGNORECASE)
        found = [name for name in whole if ending.search(name)]
        if len(found) == 1:
            return found[0]
        if found:
            break
    if whole:
        raise UsageError(
            f"{reference} has several GGUF files, and none is the obvious one",
            remedy=f"Name one: hf:{reference.repository}:FILE. {_listed(whole)}",
        )
    if models:
        raise _split(reference, models[0])
    if any(name.endswith(_PICKLES) for name in names):
        raise UnsupportedModelError(
            f"{reference} has its weights as a pickle, which can run code when it is read",
            remedy="Choose a repository with safetensors or GGUF files.",
        )
    raise UnsupportedModelError(
        f"{reference} has neither GGUF files nor config.json with safetensors",
        remedy="Choose another repository.",
    )


def _models(names: Collection[str]) -> list[str]:
    files = (name for name in names if name.lower().endswith(".gguf"))
    return sorted(name for name in files if not _NO_MODEL.search(name))


def _split(reference: HubReference, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{reference} has {name} in several parts, which this version cannot read",
        remedy="Choose a quantization in one file, or join the parts with llama-gguf-split "
        "--merge.",
    )


def _listed(files: list[str]) -> str:
    if not files:
        return "It has no GGUF file."
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"It has: {', '.join(files[:_SHOWN])}{more}."


def known_draft(repository: str) -> str | None:
    """org/name of a smaller model of the same family, None where the table has none."""
    return _known(_FAMILIES, repository)


def known_head(repository: str) -> str | None:
    """org/name of a head that was trained for this model, None where the table has none."""
    return _known(_HEADS, repository)


def _known(table: tuple[tuple[str, str], ...], repository: str) -> str | None:
    for target, draft in table:
        match = re.fullmatch(target, repository, re.IGNORECASE)
        if match is not None:
            return match.expand(draft)
    return None
