"""`--draft auto`: what `distill` has trained here for the target, else a smaller model with its
tokens, among those that are here already; and a draft in its cheapest form.

A draft token costs what its model's weights take to be read. What a draft writes is verified, so a
copy in 4 bits and an output matrix of its commonest tokens change no text. Measured on a pair of
Qwen2.5-Coder: docs/drafters.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
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
# Of the target's parameters: a draft takes a step for each token that it drafts.
LARGEST_SHARE = 0.5
_log = logging.getLogger(__name__)
DIRECTORY = "drafters"  # of trained ones, in the cache
_REPORT, _LARGEST_REPORT = "report.json", 1_000_000  # bytes
# Byte-pair encodings number tokens in the order in which they were joined, the commonest first. Of
# an answer in English or code all but one in ten thousand are among so many of Qwen's; among 65,536
# and 32,768 all but 2 and 6 in a hundred, which costs more than shorter matrices save.
COMMON_TOKENS = 98_304
_OF_WRITING = 2048  # tokens of each, such as Chinese, most of which come late in many vocabularies
_LEAST_SAVED = 1.2  # times what is left, that a file has to have to be cut down
_FOUR_BITS = 4.5 / 8  # bytes of a weight, with its scales
_LEAST_BYTES = 100_000_000  # of a draft that is copied: passes of smaller ones take other time
_MOST_BYTES = 4_000_000_000  # of all copies in the cache


@dataclass(frozen=True)
class Described:
    config: ModelConfig
    vocabulary: Mapping[str, int]  # token -> id


def describe(path: Path) -> Described:
    """A bundle, GGUF file or Hugging Face directory; its weights stay unread, and no file is
    hashed.

    Raises an EdgeSpecError where its shape or its tokens are not known.
    """
    if is_bundle(path):
        bundle = open_bundle(path, hashed=False)
        return Described(bundle.config, text_of_bundle(bundle).tokenizer.vocabulary())
    opened = runtimes.open_model_info(path) if path.is_file() else runtimes.open_checkpoint(path)
    return Described(opened.config, Tokenizer(kept_tokenizer_json(opened), None).vocabulary())


def chosen_drafts(
    source: Source, asked: AskedOptions, *, uses_trained: bool = True
) -> tuple[str, ...]:
    """Return the drafts that are named: "none" stands for no draft, "auto" for one that fits and is
    here; where none is named, the one of a pair bundle, if the drafters that were asked for can use
    it. uses_trained: as "auto". Raises as `Source.member` does, and UsageError for "auto" beside
    other names."""
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
    """Return the options with their drafts named, and checked. "auto" stands for a smaller model:
    what was trained here is `trained_options`'. keeps_answers: for later runs. Raises an
    EdgeSpecError."""
    said = {field.name: getattr(asked, field.name) for field in fields(AskedOptions)}
    drafts = chosen_drafts(source, asked, uses_trained=False)
    heads = {name: path for name in drafts if (path := head_path(name, source))}
    if len(heads) > 1 or sum(name in heads for name in drafts) > 1:
        raise UsageError("--draft names two heads", remedy="Name one of them.")
    said["draft"] = tuple(name for name in drafts if name not in heads)
    head = next(iter(heads.values()), None)
    return LoadOptions(**said, keeps_answers=keeps_answers, head=head)


def trained_options(source: Source, asked: AskedOptions) -> AskedOptions | None:
    """Return the options with the drafter that was trained here for the model; None where none
    pays, or other drafters were asked for. Raises as `Source.path` does."""
    is_free = asked.draft is None and asked.drafter == "auto"
    if not is_free and asked.named_drafts != (AUTO,):
        return None
    trained = trained_drafter(source)
    return None if trained is None else replace(asked, draft=[str(trained)])


def head_path(name: str, target: Source) -> Path | None:
    """Return the path of the trained head of this name, which is fetched if it is on the hub; None
    for a model. Raises as `Source.path` does for what is on the hub."""
    path = Source(name, target.progress).path if is_on_hub(name) else expanded(Path(name))
    is_targets = path.is_file() and target.is_fetched and path.samefile(target.path)
    return path if runtimes.is_head(path, is_targets) else None


def suggest_draft(target: Source) -> str | None:
    """Return the smallest MODEL of the caches that has the target's tokens and at most
    LARGEST_SHARE of its size; a pair bundle's own draft where there is one.

    None, which one line says, where nothing fits. Raises as `Source.path` does.
    """
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
    """Yield MODELs that are here, and their paths."""
    from edge_spec.models.hub_download import list_cached

    for cached in list_cached():
        yield str(cached.reference), cached.path
    for path in sorted((cache_directory() / "models").glob("*.gguf")):
        yield str(path), path


def place_of(source: Source, kind: str) -> Path:
    """Returns where the drafter of a kind is kept for a model. Raises as `Source.identity` does."""
    return cache_directory() / DIRECTORY / f"{source.name}-{kind}-{source.identity}"


def trained_drafter(source: Source) -> Path | None:
    """Returns the one for this model that is forecast to pay most; None where none pays. Raises as
    `Source.identity` does."""
    folder = cache_directory() / DIRECTORY
    if not folder.is_dir():  # as nearly everywhere: nothing is read of the model
        return None
    found = {}
    for path in sorted(folder.glob(f"[!.]*-{source.identity}")):
        speedup = _forecast(path)
        if speedup is not None and speedup > 1:
            found[path] = speedup
    return max(found, key=found.__getitem__, default=None)


def training_report(path: Path) -> Mapping[str, Any]:
    """Returns what `edge-spec distill` has written beside a drafter; nothing where there is no
    report that can be read: it is only a first expectation."""
    with suppress(OSError, ValueError, RecursionError):
        with (path / _REPORT).open("rb") as file:
            found = json.loads(file.read(_LARGEST_REPORT))
        return found if isinstance(found, dict) else {}
    return {}


def _forecast(path: Path) -> float | None:
    """Returns the speedup that is forecast, None for a drafter that does not pay."""
    report = training_report(path)
    with suppress(ValueError, TypeError, KeyError):
        return float(report["forecast"]["speedup"]) if report["pays"] is True else None
    _log.debug("%s has no report that can be read", path)
    return None


def cheapest(
    draft: PreparedModel, source: Source, progress: Progress, makes: bool = True
) -> PreparedModel:
    """Returns the draft as its passes take least time: with the copy in 4 bits that the cache has
    of it, and with scores of common tokens. Only where kernels of ours compute it: others were not
    compared. makes: the copy, where there is none."""
    if draft.runtime.reads != "gguf" or not runtimes.own_kernels(draft.runtime.name):
        return draft
    small = _in_four_bits(draft, source, progress, makes)
    return replace(small, scored_tokens=_common_tokens(draft))


def _in_four_bits(
    draft: PreparedModel, source: Source, progress: Progress, makes: bool
) -> PreparedModel:
    """Returns the draft itself where that saves little, or cannot be."""
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

    waiting = partial(progress, "Waiting for another process that makes a copy", 0.0)
    try:
        make_once(kept, lambda: kept if kept.is_file() else None, make, waiting)
        with suppress(OSError):
            kept.touch()  # the last one to go
        copied = runtimes.open_model_info(kept)
    except (EdgeSpecError, OSError) as error:
        _log.warning("the draft %s stays as it is: %s", draft.name, error)
        return draft
    return replace(draft, source=copied, as_it_is=False)


def _common_tokens(draft: PreparedModel) -> ScoredTokens | None:
    """Returns the tokens that a draft need score, with all that a text never spells; None where
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
