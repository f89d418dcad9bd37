"""`--draft auto`: what was trained here for the target, else a smaller model with its tokens, among
those that are here already."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.drafters import factory
from edge_spec.errors import BundleError, EdgeSpecError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle, open_unhashed, read_manifest
from edge_spec.models.hub.cache import list_cached
from edge_spec.models.model_text import kept_tokenizer_json, text_of_bundle
from edge_spec.models.source import Source
from edge_spec.models.trained_drafter import trained_drafter
from edge_spec.storage.atomic import cache_directory
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import same_vocabulary

AUTO = "auto"
# Of the target's parameters: a draft takes a step for each token that it drafts.
LARGEST_SHARE = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Described:
    config: ModelConfig
    vocabulary: Mapping[str, int]  # token -> id

    def can_draft_for(self, target: Described) -> bool:
        largest = LARGEST_SHARE * target.config.num_parameters
        return self.config.num_parameters <= largest and same_vocabulary(
            target.vocabulary, self.vocabulary
        )


def describe(path: Path) -> Described:
    """A bundle, GGUF file or Hugging Face directory; its weights stay unread, and no file is
    hashed.

    Raises an EdgeSpecError where its shape or its tokens are not known.
    """
    if is_bundle(path):
        bundle = open_unhashed(path)
        return Described(bundle.config, text_of_bundle(bundle).tokenizer.vocabulary())
    opened = runtimes.open_model_info(path) if path.is_file() else runtimes.open_checkpoint(path)
    return Described(opened.config, Tokenizer(kept_tokenizer_json(opened), None).vocabulary())


def chosen_drafts(
    source: Source,
    named: Sequence[str] | None,
    drafter: str,
    *,
    is_planned: bool,
    draft_runtime: str = "auto",
) -> tuple[str, ...]:
    """named: "none" stands for no draft, "auto" for one that fits and is here; None for the one of
    a pair bundle, where the drafters that were asked for can use it and no plan says who drafts.
    Raises as `Source.member` does, and UsageError for "auto" beside other names."""
    if named is not None and AUTO in named:
        if len(named) > 1:
            raise UsageError(
                "--draft auto chooses the only draft", remedy="Leave it or the others out."
            )
        trained = trained_drafter(source)
        suggested = str(trained) if trained else suggest_draft(source, draft_runtime)
        if suggested is not None:
            source.progress(f"Drafting with {suggested}", 0.0)
        return () if suggested is None else (suggested,)
    if named is not None:
        return tuple(name for name in named if name != "none")
    draft = None if source.member is None else source.member.draft
    if draft is None or is_planned:
        return ()
    named_traits = factory.traits_of(drafter).values()
    if drafter != "auto" and not any(traits.draft_model for traits in named_traits):
        return ()
    return (str(draft),)


def suggest_draft(target: Source, draft_runtime: str = "auto") -> str | None:
    """A MODEL: the smallest that has the target's tokens and at most LARGEST_SHARE of its size,
    from the hub's cache and edge-spec's own; a pair bundle's own draft where there is one.

    None, which one line says, where nothing fits. Raises as `Source.path` does.
    """
    if target.member is not None:
        return None if target.member.draft is None else str(target.member.draft)
    try:
        wanted = describe(target.path)
    except EdgeSpecError as error:
        _log.warning("no draft is suggested for %s: %s", target.name, error)
        return None
    fitting = []
    for model, path in _candidates(draft_runtime):
        try:
            found = describe(path)
        except (EdgeSpecError, OSError) as error:
            _log.debug("%s cannot draft: %s", model, error)
            continue
        if found.can_draft_for(wanted):
            fitting.append((found.config.num_parameters, model))
    if fitting:
        return min(fitting)[1]
    _log.warning(
        "there is no draft for %s here: no model in the caches has its tokens and at most half its "
        "size. edge-spec pull hf:... --draft auto fetches one where it knows the family",
        target.name,
    )
    return None


def _candidates(draft_runtime: str) -> Iterator[tuple[str, Path]]:
    """MODELs and their paths; of conversions those that a runtime reads which the draft may get."""
    for cached in list_cached():
        yield str(cached.reference), cached.path
    for path in sorted((cache_directory() / "models").glob("*.gguf")):
        yield str(path), path
    names = runtimes.installed_runtimes() if draft_runtime == "auto" else [draft_runtime]
    reads = {runtimes.load_runtime(name).reads for name in names}
    for path in sorted((cache_directory() / "bundles").glob("[!.]*")):
        if _format(path) in reads:
            yield str(path), path


def _format(path: Path) -> str | None:
    """Returns the format of a conversion; None where its manifest does not say it."""
    if not is_bundle(path):
        return path.suffix[1:]
    try:
        return read_manifest(path).format
    except BundleError as error:
        _log.debug("%s cannot draft: %s", path, error)
        return None
