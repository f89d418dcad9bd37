"""`--draft auto`: a drafter that `distill` trained here, else a smaller local model with the
target's tokens; and a draft's cheapest form.

A draft token costs the reading of the draft's weights. Drafts are verified, so 4-bit weights and
logits of common tokens only change no text. Measurements on a Qwen2.5-Coder pair: docs/drafters.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress, ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.drafters import factory
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import is_bundle, open_bundle
from edge_spec.models.hub import is_on_hub
from edge_spec.models.model_plan import PreparedModel
from edge_spec.models.model_text import kept_tokenizer_json, text_of_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.storage.atomic import (
    atomic_file,
    cache_directory,
    expanded,
    make_once,
    remove_oldest,
)
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import frequent_tokens, same_vocabulary

AUTO = "auto"
# Of the target's parameters: each draft token costs a step.
LARGEST_SHARE = 0.5
_log = logging.getLogger(__name__)
DIRECTORY = "drafters"  # of trained ones, in the cache
_REPORT, _LARGEST_REPORT = "report.json", 1_000_000  # bytes
# BPE numbers tokens in merge order, commonest first. With Qwen, so many cover all but one in ten
# thousand tokens of an answer in English or code; 65,536 and 32,768 miss 2 and 6 in a hundred,
# which costs more than shorter matrices save.
COMMON_TOKENS = 98_304
# tokens of each script, such as Chinese, which many vocabularies number late
_OF_WRITING = 2048
_LEAST_SAVED = 1.2  # least ratio of a file's size to its copy's
_FOUR_BITS = 4.5 / 8  # bytes of a weight, with scales
_LEAST_BYTES = 100_000_000  # of a draft to copy; passes of smaller ones are not bound by bytes
_MOST_BYTES = 4_000_000_000  # of all copies in the cache


@dataclass(frozen=True)
class Described:
    config: ModelConfig
    vocabulary: Mapping[str, int]  # token -> id


def describe(path: Path) -> Described:
    """Describe a bundle, GGUF file or Hugging Face directory; reads no weights, hashes nothing.
    Raises an EdgeSpecError if shape or tokens are unknown."""
    if is_bundle(path):
        bundle = open_bundle(path, hashed=False)
        return Described(bundle.config, text_of_bundle(bundle).tokenizer.vocabulary())
    opened = runtimes.open_model_info(path) if path.is_file() else runtimes.open_checkpoint(path)
    return Described(opened.config, Tokenizer(kept_tokenizer_json(opened), None).vocabulary())


def chosen_drafts(
    source: Source, asked: AskedOptions, *, uses_trained: bool = True
) -> tuple[str, ...]:
    """Return the drafts: those named, "auto" replaced by a local one that fits, "none" dropped;
    else a pair bundle's, if the requested drafters use one. uses_trained: for "auto". Raises as
    `Source.member` does, and UsageError for "auto" with other names."""
    named = asked.named_drafts
    if named is not None and AUTO in named:
        if len(named) > 1:
            raise UsageError(
                "--draft auto chooses the only draft", remedy="Leave it or the others out."
            )
        trained = trained_drafter(source) if uses_trained else None
        suggested = str(trained) if trained else suggest_draft(source)
        if suggested is not None:
            source.progress(f"Drafting with {suggested}", 0.0)
        return () if suggested is None else (suggested,)
    if named is not None:
        return tuple(name for name in named if name != "none")
    draft = None if source.member is None else source.member.draft
    if draft is None:
        return ()
    named_traits = factory.traits_of(asked.drafter).values()
    if asked.drafter != "auto" and not any(traits.draft_model for traits in named_traits):
        return ()
    return (str(draft),)


def named_options(source: Source, asked: AskedOptions, keeps_answers: bool) -> LoadOptions:
    """Return checked options with named drafts. "auto" is a smaller model here; `trained_options`
    finds trained drafters. keeps_answers: for later runs. Raises an EdgeSpecError."""
    said = {field.name: getattr(asked, field.name) for field in fields(AskedOptions)}
    drafts = chosen_drafts(source, asked, uses_trained=False)
    heads = {name: path for name in drafts if (path := head_path(name, source))}
    if len(heads) > 1 or sum(name in heads for name in drafts) > 1:
        raise UsageError("--draft names two heads", remedy="Name one of them.")
    said["draft"] = tuple(name for name in drafts if name not in heads)
    head = next(iter(heads.values()), None)
    return LoadOptions(**said, keeps_answers=keeps_answers, head=head)


def trained_options(source: Source, asked: AskedOptions) -> AskedOptions | None:
    """Return options with the drafter trained here; None if none pays or others were requested.
    Raises as `Source.path` does."""
    is_free = asked.draft is None and asked.drafter == "auto"
    if not is_free and asked.named_drafts != (AUTO,):
        return None
    trained = trained_drafter(source)
    return None if trained is None else replace(asked, draft=[str(trained)])


def head_path(name: str, target: Source) -> Path | None:
    """Return the path of a trained head, fetched if on the hub; None for a model. Raises as
    `Source.path` does for the hub."""
    path = Source(name, target.progress).path if is_on_hub(name) else expanded(Path(name))
    is_targets = path.is_file() and target.is_fetched and path.samefile(target.path)
    return path if runtimes.is_head(path, is_targets) else None


def suggest_draft(target: Source) -> str | None:
    """Return the smallest cached model with the target's tokens and at most LARGEST_SHARE of its
    size, or a pair bundle's draft; if none fits, log that and return None. Raises as `Source.path`
    does."""
    if target.member is not None:
        return None if target.member.draft is None else str(target.member.draft)
    try:
        wanted = describe(target.path)
    except EdgeSpecError as error:
        _log.warning("no draft is suggested for %s: %s", target.name, error)
        return None
    largest, fitting = LARGEST_SHARE * wanted.config.num_parameters, []
    for model, path in _candidates():
        try:
            found = describe(path)
        except (EdgeSpecError, OSError) as error:
            _log.debug("%s cannot draft: %s", model, error)
            continue
        size = found.config.num_parameters
        if size <= largest and same_vocabulary(wanted.vocabulary, found.vocabulary):
            fitting.append((size, model))
    if fitting:
        return min(fitting)[1]
    _log.warning(
        "there is no draft for %s here: no model in the caches has its tokens and at most half its "
        "size. edge-spec pull hf:... --draft auto fetches one where it knows the family",
        target.name,
    )
    return None


def _candidates() -> Iterator[tuple[str, Path]]:
    from edge_spec.models.hub_download import list_cached

    for cached in list_cached():
        yield str(cached.reference), cached.path
    for path in sorted((cache_directory() / "models").glob("*.gguf")):
        yield str(path), path


def place_of(source: Source, kind: str) -> Path:
    """Return where a model's drafter of this kind is kept. Raises as `Source.identity` does."""
    return cache_directory() / DIRECTORY / f"{source.name}-{kind}-{source.identity}"


def trained_drafter(source: Source) -> Path | None:
    """Return the trained drafter with the best forecast; None if none pays. Raises as
    `Source.identity` does."""
    folder = cache_directory() / DIRECTORY
    if not folder.is_dir():  # the usual case: the model is not read
        return None
    found = {}
    for path in sorted(folder.glob(f"[!.]*-{source.identity}")):
        speedup = _forecast(path)
        if speedup is not None and speedup > 1:
            found[path] = speedup
    return max(found, key=found.__getitem__, default=None)


def training_report(path: Path) -> Mapping[str, Any]:
    """Return `edge-spec distill`'s report on a drafter, a first expectation only; empty if
    unreadable."""
    with suppress(OSError, ValueError, RecursionError):
        with (path / _REPORT).open("rb") as file:
            found = json.loads(file.read(_LARGEST_REPORT))
        return found if isinstance(found, dict) else {}
    return {}


def _forecast(path: Path) -> float | None:
    report = training_report(path)
    with suppress(ValueError, TypeError, KeyError):
        return float(report["forecast"]["speedup"]) if report["pays"] is True else None
    _log.debug("%s has no report that can be read", path)
    return None


def cheapest(
    draft: PreparedModel, source: Source, progress: Progress, makes: bool = True
) -> PreparedModel:
    """Return the fastest form of a draft: its 4-bit copy from the cache, scoring common tokens
    only. Only with our kernels; others were not compared. makes: make a missing copy."""
    if draft.runtime.reads != "gguf" or not runtimes.own_kernels(draft.runtime.name):
        return draft
    small = _in_four_bits(draft, source, progress, makes)
    return replace(small, scored_tokens=_common_tokens(draft))


def _in_four_bits(
    draft: PreparedModel, source: Source, progress: Progress, makes: bool
) -> PreparedModel:
    info: ModelInfo = draft.source
    if not (draft.as_it_is and _is_large(info)):
        return draft
    kept = cache_directory() / "drafts" / f"{source.name}-{source.identity}-Q4_0.gguf"
    if not (makes or kept.is_file()):
        return draft
    exporter: Any = runtimes.load_exporter("gguf")

    def make() -> None:
        with atomic_file(kept) as unfinished:
            exporter.requantize(info.path, unfinished, "Q4_0", progress)
        remove_oldest(kept.parent.glob("*.gguf"), _MOST_BYTES, kept)

    try:
        make_once(kept, lambda: kept if kept.is_file() else None, make)
        with suppress(OSError):
            kept.touch()  # evicted last
        copied = runtimes.open_model_info(kept)
    except (EdgeSpecError, OSError) as error:
        _log.warning("the draft %s stays as it is: %s", draft.name, error)
        return draft
    return replace(draft, source=copied, as_it_is=False)


def _common_tokens(draft: PreparedModel) -> ScoredTokens | None:
    """Return the tokens that a draft needs to score, with those that text never spells; None if
    these are most."""
    size = draft.config.vocab_size
    likely = frequent_tokens(draft.vocabulary(), size, COMMON_TOKENS, _OF_WRITING)
    if likely is None:
        return None
    added = {token for token, _ in draft.text.tokenizer.added_tokens().values()}
    kept = {*likely.tolist(), *added, *draft.text.eos_ids}
    return ScoredTokens.of(token for token in kept if token < size)


def _is_large(info: ModelInfo) -> bool:
    with suppress(OSError):
        small = _LEAST_SAVED * _FOUR_BITS * info.config.num_parameters
        return info.path.stat().st_size > max(_LEAST_BYTES, small)
    return False
