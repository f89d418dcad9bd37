"""`hf:org/name[@revision][:file]`: parse it, choose files, and know a model's draft."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.models.bundle import is_below

PREFIX = "hf:"
DEFAULT_REVISION = "main"

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"  # of a repository's name; becomes a folder's name
_REFERENCE = re.compile(rf"hf:({_PART}/{_PART})(?:@([^:@]{{1,200}}))?(?::(.+))?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# Files besides the weights; only the first two are required.
_DESCRIPTION = (
    *(CONFIG, TOKENIZER, "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "special_tokens_map.json"),
)
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files without a model
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Of several GGUF files: Q4_0 is what all runtimes here run or convert unchanged, Q8_0 nearly
# lossless; the rest by how common they are.
_PREFERRED = (
    *("Q4_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K_S", "Q5_K_S", "F16", "BF16", "F32"),
)
_MOST_LISTED = 12  # files in a remedy

# Repository of a target -> its draft's: the family's smallest instruct model from the same
# publisher, in the same form (safetensors or GGUF). Only a suggestion: the downloaded files show
# whether the tokens match.
_LLAMA = r"(?:Meta-)?Llama-3\.(?:1-8B|1-70B|2-3B|3-70B)-Instruct"
_DRAFTS = (
    (
        r"Qwen/Qwen2\.5-(Coder-)?(?:1\.5|3|7|14|32|72)B-Instruct(-GGUF)?",
        r"Qwen/Qwen2.5-\g<1>0.5B-Instruct\2",
    ),
    (r"Qwen/Qwen3-(?:1\.7|4|8|14|32)B(-GGUF)?", r"Qwen/Qwen3-0.6B\1"),
    (rf"meta-llama/{_LLAMA}", r"meta-llama/Llama-3.2-1B-Instruct"),
    (rf"(bartowski|unsloth)/{_LLAMA}-GGUF", r"\1/Llama-3.2-1B-Instruct-GGUF"),
    (r"HuggingFaceTB/SmolLM2-(?:360M|1\.7B)-Instruct", r"HuggingFaceTB/SmolLM2-135M-Instruct"),
    (r"bartowski/SmolLM2-(?:360M|1\.7B)-Instruct-GGUF", r"bartowski/SmolLM2-135M-Instruct-GGUF"),
    (r"google/gemma-3-(?:1|4|12|27)b-it", r"google/gemma-3-270m-it"),
    (r"google/gemma-3-(?:4|12|27)b-it-qat-q4_0-gguf", r"google/gemma-3-1b-it-qat-q4_0-gguf"),
)


def known_draft(repository: str) -> str | None:
    """Return the repository of a model's draft, if known."""
    for target, draft in _DRAFTS:
        match = re.fullmatch(target, repository, re.IGNORECASE)
        if match is not None:
            return match.expand(draft)
    return None


@dataclass(frozen=True)
class HubReference:
    repository: str  # org/name
    revision: str = DEFAULT_REVISION  # a branch, tag or commit
    file: str | None = None  # a GGUF file of the repository; None: chosen

    @classmethod
    def parse(cls, model: str) -> HubReference:
        """Parse a model's name; no part leads out of its folder. Raises UsageError."""
        match = _REFERENCE.fullmatch(model)
        if match is None or "--" in match[1] or ".." in match[1]:
            raise UsageError(
                f"{model!r} names no model of the hub",
                remedy="Write hf:org/name, hf:org/name:file.gguf or hf:org/name@revision.",
            )
        repository, revision, file = match[1], match[2] or DEFAULT_REVISION, match[3]
        if not _REVISION.fullmatch(revision) or not is_below(revision):
            raise UsageError(
                f"{revision!r} is no revision", remedy="Give a branch, a tag or a commit after @."
            )
        if file is not None and not (is_below(file) and is_gguf(file)):
            raise UsageError(
                f"{file!r} is not the name of a GGUF file",
                remedy=f"Name one, or write hf:{repository} for a model of safetensors.",
            )
        return cls(repository, revision, file)

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        file = "" if self.file is None else f":{self.file}"
        return f"{PREFIX}{self.repository}{revision}{file}"


def is_on_hub(model: str) -> bool:
    return model.startswith(PREFIX)


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def has_to_be_head(names: Collection[str]) -> bool:
    """Return whether a tokenizer is missing, as only a trained head's may; config.json decides."""
    return CONFIG in names and TOKENIZER not in names


def choose(reference: HubReference, names: Collection[str]) -> tuple[str, ...]:
    """Choose the files that belong together: a Hugging Face directory's if there are safetensors,
    else one GGUF file. names: with "/" between folders. Raises UsageError if unclear,
    UnsupportedModelError if none is readable."""
    if reference.file is not None:
        if reference.file not in names:
            raise UsageError(
                f"hf:{reference.repository} has no file {reference.file}",
                remedy=_list(_find_gguf(names)),
            )
        return (_choose_gguf(reference, [reference.file]),)
    if CONFIG not in names:
        return (_choose_gguf(reference, names),)
    weights = _find_safetensors(names)
    if TOKENIZER not in names:
        # some heads name their weights differently
        others = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        weights = weights or (tuple(others) if len(others) == 1 else ())
        if weights:
            return (CONFIG, *weights)
    if not weights:
        return (_choose_gguf(reference, names),)
    described = [name for name in _DESCRIPTION if name in names]
    return (*described, *sorted(filter(_TEMPLATES.fullmatch, names)), *weights)


def _find_safetensors(names: Collection[str]) -> tuple[str, ...]:
    """Return the index and all shards, or the single file; nothing if a shard is missing."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if _INDEX in names and shards:
        total = int(shards[0].removesuffix(".safetensors")[-5:])
        return (_INDEX, *shards) if len(shards) == total else ()
    return (_SINGLE,) if _SINGLE in names else ()


def _choose_gguf(reference: HubReference, names: Collection[str]) -> str:
    models = _find_gguf(names)
    whole = [name for name in models if not _SPLIT.search(name)]
    if len(whole) == 1:
        return whole[0]
    for quantization in _PREFERRED:
        ending = re.compile(rf"(?:^|[-._/]){quantization}\.gguf$", re.IGNORECASE)
        found = [name for name in whole if ending.search(name)]
        if len(found) == 1:
            return found[0]
        if found:
            break
    if whole:
        raise UsageError(
            f"{reference} has several GGUF files, and none is the obvious one",
            remedy=f"Name one: hf:{reference.repository}:FILE. {_list(whole)}",
        )
    if models:
        raise UnsupportedModelError(
            f"{reference} has {models[0]} in several parts, which this version cannot read",
            remedy="Choose a quantization in one file, or join the parts with llama-gguf-split "
            "--merge.",
        )
    if any(name.endswith(_PICKLES) for name in names):
        raise UnsupportedModelError(
            f"{reference} has its weights as a pickle, which can run code when it is read",
            remedy="Choose a repository with safetensors or GGUF files.",
        )
    raise UnsupportedModelError(
        f"{reference} has neither GGUF files nor config.json with safetensors",
        remedy="Choose another repository.",
    )


def _find_gguf(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if is_gguf(name) and not _NO_MODEL.search(name))


def _list(files: list[str]) -> str:
    if not files:
        return "It has no GGUF file."
    more = f" and {len(files) - _MOST_LISTED} more" if len(files) > _MOST_LISTED else ""
    return f"It has: {', '.join(files[:_MOST_LISTED])}{more}."
