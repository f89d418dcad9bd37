"""How drafters are made: what they may build on, and the entry points of this package's own.

An entry point of the group `edge_spec.drafters` is a function that takes a `DrafterContext` and
returns a `Drafter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_spec.core.entry_points import load_plugin
from edge_spec.drafters.draft.draft import Draft
from edge_spec.drafters.draft.self_draft import Search, SelfDrafter, TargetPart
from edge_spec.drafters.jacobi.jacobi import DEFAULT_BLOCK, JacobiDrafter
from edge_spec.drafters.jacobi.jacobi_init import JacobiInit
from edge_spec.drafters.jacobi.lookahead import DEFAULT_SIZE, LookaheadDrafter, WindowSize
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Drafter, Tentative
from edge_spec.errors import UsageError
from edge_spec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from edge_spec.drafters.lookup.corpus_index import CorpusIndex


@dataclass(frozen=True)
class DrafterContext:
    """The target as drafters see it, and the user's options for them."""

    vocab_size: int  # of the target
    tokens: Callable[[], Mapping[str, int]] = dict  # its vocabulary: token -> id
    ngram_file: Path | None = None  # where its n-grams are kept from one run to the next
    keeps_ngrams: bool = True  # those of this run, too
    corpora: Sequence[CorpusIndex] = ()
    draft_n_max: int | None = None  # draft tokens a round
    window: WindowSize | None = None
    fill: JacobiInit | None = None  # of Jacobi blocks
    searches: Mapping[str, Search] = field(default_factory=dict)  # of drafters that are a part of
    # the target, by their names
    parts: Mapping[str, TargetPart] = field(default_factory=dict)  # settled before
    drafts: Sequence[Draft] = ()  # the first drafts for the target, each other for the one before


def suffix(setting: DrafterContext) -> Drafter:
    return SuffixDrafter()


def recycling(setting: DrafterContext) -> Drafter:
    return RecyclingDrafter()


def lookahead(setting: DrafterContext) -> Drafter:
    if setting.window is None and setting.draft_n_max is not None:
        return LookaheadDrafter(WindowSize.within(setting.draft_n_max + 1))
    return LookaheadDrafter(setting.window or DEFAULT_SIZE)


def jacobi(setting: DrafterContext) -> Drafter:
    return JacobiDrafter(setting.fill or JacobiInit.NGRAM, setting.draft_n_max or DEFAULT_BLOCK)


def corpus(setting: DrafterContext) -> Drafter:
    """Raises UsageError without a corpus."""
    from edge_spec.drafters.lookup.corpus import CorpusDrafter

    if not setting.corpora:
        raise UsageError(
            "the drafter corpus needs a text",
            remedy="Name a file or directory with --corpus PATH.",
        )
    return CorpusDrafter(setting.corpora)


def ngram_cache(setting: DrafterContext) -> Drafter:
    """Raises UsageError where there is no place for its file."""
    from edge_spec.drafters.lookup.ngram_cache import NgramCacheDrafter

    if setting.ngram_file is None:
        raise UsageError(
            "the drafter ngram-cache needs a file", remedy="Open the model by its name or path."
        )
    vocabulary = Vocabulary.of(setting.tokens()).sha256
    return NgramCacheDrafter(
        setting.ngram_file, vocabulary, setting.vocab_size, keeps=setting.keeps_ngrams
    )


def draft_model(setting: DrafterContext) -> Drafter:
    """Raises UsageError without a draft."""
    return _cascade(setting, [], "draft-model")


def cascade(setting: DrafterContext) -> Drafter:
    """The draft, with suffix lookup as its own drafter. Raises UsageError without a draft."""
    return _cascade(setting, [SuffixDrafter()], "cascade")


def _cascade(setting: DrafterContext, lowest: Sequence[Tentative], name: str) -> Drafter:
    if not setting.drafts:
        raise missing_draft(name)
    below = lowest
    for draft in reversed(setting.drafts[1:]):
        below = [draft.make_level(below, name)]
    return setting.drafts[0].make_drafter(below, name)


def early_exit(setting: DrafterContext) -> Drafter:
    return _self_drafter(setting, "early-exit")


def layer_skip(setting: DrafterContext) -> Drafter:
    return _self_drafter(setting, "layer-skip")


def _self_drafter(setting: DrafterContext, name: str) -> Drafter:
    if name not in setting.searches:
        raise UsageError(
            f"the drafter {name} needs the target that it is a part of",
            remedy="Open the model with edge_spec.load.",
        )
    return SelfDrafter(name, setting.searches[name], setting.parts.get(name))


def missing_draft(name: str) -> UsageError:
    return UsageError(
        f"the drafter {name} needs a second model", remedy="Name it with --draft MODEL."
    )


AUTO_DRAFTERS = ("suffix",)


PAIR_DRAFTERS = ("draft-model", "cascade")  # that a second model makes possible


SELF_DRAFTERS = ("early-exit", "layer-skip")  # that are a part of their target


COSTLY_DRAFTERS = PAIR_DRAFTERS + SELF_DRAFTERS


def load_drafters(chosen: str, setting: DrafterContext) -> list[Drafter]:
    """New drafters for "auto", "none", or names joined by commas.

    "auto" is a cascade with the draft where there is one, else AUTO_DRAFTERS, and the corpora where
    there are any.
    Raises UsageError for a name that is not installed or that the setting lacks something for.
    """
    if chosen == "none":
        return []
    wanted = [name.strip() for name in chosen.split(",")]
    if chosen == "auto":
        wanted = ["cascade"] if setting.drafts else list(AUTO_DRAFTERS)
        wanted += ["corpus"] if setting.corpora else []
    if len(set(wanted)) < len(wanted):
        raise UsageError(f"{chosen} names a drafter twice", remedy="Name each once.")
    makers: list[Callable[[DrafterContext], Drafter]] = [
        load_plugin("drafters", name) for name in wanted
    ]
    return [make(setting) for make in makers]
