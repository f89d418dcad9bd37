"""Reads `hf:org/name[@revision][:file]`, asks the hub for that repository's files, puts refusals
into words, and chooses the files of the model that is meant."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edge_spec.errors import DownloadError, UnsupportedModelError, UsageError
from edge_spec.models.bundle import is_below

PREFIX = "hf:"
DEFAULT_REVISION = "main"
_SHOWN = 200  # characters of what is no reference

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"  # of a repository's name; becomes a folder's name
_REFERENCE = re.compile(rf"hf:({_PART}/{_PART})(?:@([^:@]{{1,200}}))?(?::(.+))?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILES = 100_000
_LISTING_TIMEOUT_S = 30.0
# What huggingface_hub sends its requests with, by version, and the error that all others are.
_TRANSPORTS = (("requests", "RequestException"), ("httpx", "HTTPError"), ("httpx2", "HTTPError"))
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
_MOST_LISTED = 12  # files of a remedy
# Repository of a target -> repository of its draft; of each family the smallest instruct model,
# in the same form (safetensors or GGUF) from the same publisher. What the table says is a
# suggestion: whether the tokens are the same is seen from the files, once they are here.
DRAFTS = (
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
HEADS = (
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
class HubReference:
    repository: str  # org/name
    revision: str = DEFAULT_REVISION  # a branch, tag or commit
    file: str | None = None  # one GGUF file of the repository; None: chosen

    @classmethod
    def parse(cls, model: str) -> HubReference:
        """Raises UsageError; so no part of a reference leads out of the folder it names."""
        match = _REFERENCE.fullmatch(model)
        if match is None or "--" in match[1] or ".." in match[1]:
            raise UsageError(
                f"{model[:_SHOWN]!r} names no model of the hub",
                remedy="Write hf:org/name, hf:org/name:file.gguf or hf:org/name@revision.",
            )
        repository, revision, file = match[1], match[2] or DEFAULT_REVISION, match[3]
        if not _REVISION.fullmatch(revision) or not is_below(revision):
            raise UsageError(
                f"{revision!r} is no revision", remedy="Give a branch, a tag or a commit after @."
            )
        if file is not None and not (is_below(file) and file.lower().endswith(".gguf")):
            raise UsageError(
                f"{file[:_SHOWN]!r} is not the name of a GGUF file",
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


class UnreachableError(DownloadError):
    """The hub cannot be asked now; what the cache holds can still be used."""


@dataclass(frozen=True)
class RemoteFile:
    num_bytes: int
    digest: str  # the content's SHA-256 (64 digits), or Git's SHA-1 of a small file (40)

    @property
    def is_large(self) -> bool:
        """Says whether it is stored outside of Git, so that its SHA-256 is known."""
        return len(self.digest) == 64


@dataclass(frozen=True)
class RepositoryListing:
    commit: str
    files: Mapping[str, RemoteFile]  # by their names, "/" between folders


def library() -> Any:
    """huggingface_hub, imported with its telemetry off unless the user has set otherwise."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def list_files(reference: HubReference) -> RepositoryListing:
    """One request, with the user's token where there is one (HF_TOKEN, or a login's).

    Raises DownloadError; UnreachableError where the network or the hub fails.
    """
    hub = library()
    if hub.constants.HF_HUB_OFFLINE:
        raise UnreachableError(
            f"{reference} is not wholly in the cache, and HF_HUB_OFFLINE is set",
            remedy="Unset it, or pull the model while online.",
        )
    api = hub.HfApi(endpoint=hub.constants.ENDPOINT, library_name="edge-spec")
    with in_words(reference):
        try:
            info = api.model_info(
                reference.repository,
                revision=reference.revision,
                files_metadata=True,
                timeout=_LISTING_TIMEOUT_S,
            )
        except hub.errors.HfHubHTTPError:  # of some versions a ValueError, too
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _distrusted(reference, "its answer is no list of files") from None
    entries = info.siblings or []
    if not COMMIT.fullmatch(info.sha or "") or len(entries) > _MAX_FILES:
        raise _distrusted(reference, "its answer is no list of files")
    return RepositoryListing(
        info.sha, {entry.rfilename: _remote(reference, entry) for entry in entries}
    )


def _remote(reference: HubReference, entry: Any) -> RemoteFile:
    name = entry.rfilename
    if not is_below(name):
        raise _distrusted(reference, f"it lists a file outside of the repository, {name!r}")
    large = entry.lfs
    num_bytes, digest = (large.size, large.sha256) if large else (entry.size, entry.blob_id)
    known = isinstance(num_bytes, int) and num_bytes >= 0 and isinstance(digest, str)
    if not known or not (_SHA256 if large else COMMIT).fullmatch(digest):
        raise _distrusted(reference, f"it states no size and hash of {name!r}")
    return RemoteFile(num_bytes, digest)


def _distrusted(reference: HubReference, why: str) -> DownloadError:
    return DownloadError(
        f"what the hub says of {reference} cannot be used: {why}",
        remedy="Do not use this repository; where HF_ENDPOINT is set, check that server.",
    )


@contextmanager
def in_words(reference: HubReference) -> Iterator[None]:
    """Errors of huggingface_hub and of its transport become ours, with what to do."""
    hub = library()
    errors = hub.errors
    failures: tuple[type[Exception], ...] = (ConnectionError, TimeoutError, *_transport_errors())
    try:
        yield
    except errors.HfHubHTTPError as error:
        raise _refused(reference, error, errors) from None
    except failures as error:
        raise UnreachableError(
            f"{reference} is not wholly in the cache, and {hub.constants.ENDPOINT} cannot be "
            f"reached: {str(error) or type(error).__name__}",
            remedy="Check the network and its proxy, then try again: what has arrived is kept.",
        ) from None


def _refused(reference: HubReference, error: Any, errors: Any) -> DownloadError:
    endpoint = library().constants.ENDPOINT
    page = f"{endpoint}/{reference.repository}"
    status = getattr(error.response, "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"hf:{reference.repository} is gated: its owner lets in only who has asked",
            remedy=f"Ask on {page}, then set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(
            f"hf:{reference.repository} has no revision {reference.revision!r}",
            remedy=f"Its branches and tags are listed on {page}.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"there is no model {reference.repository} on {endpoint}, or it is private",
            remedy="Check the name; for a private model set HF_TOKEN to a token that may read it.",
        )
    if status in (401, 403):
        return DownloadError(
            f"{endpoint} does not let this account read {reference} (status {status})",
            remedy="Check HF_TOKEN: it may have expired or lack the right to read this model.",
        )
    if status == 404:
        return DownloadError(
            f"{endpoint} lists a file of {reference} that it does not have",
            remedy="Try again; the repository may just have changed.",
        )
    return UnreachableError(
        f"{endpoint} could not answer for {reference} (status {status})",
        remedy="Try again later; what has arrived is kept.",
    )


def _transport_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of the transports that are loaded."""
    return tuple(
        getattr(sys.modules[module], name) for module, name in _TRANSPORTS if module in sys.modules
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
    more = f" and {len(files) - _MOST_LISTED} more" if len(files) > _MOST_LISTED else ""
    return f"It has: {', '.join(files[:_MOST_LISTED])}{more}."


def known(table: tuple[tuple[str, str], ...], repository: str) -> str | None:
    """Returns org/name of the draft, or of the head, that a table has for this model; None where it
    has none."""
    for target, draft in table:
        match = re.fullmatch(target, repository, re.IGNORECASE)
        if match is not None:
            return match.expand(draft)
    return None
