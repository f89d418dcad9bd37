"""A draft in its cheapest form: a copy in 4 bits, and an output matrix of its commonest tokens.

A draft token costs what its model's weights take to be read. What a draft writes is verified, so a
form of it that is right a little less often changes no text. Measured on a pair of Qwen2.5-Coder:
docs/drafters.md.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_spec.core.export import Requantizes
from edge_spec.core.model import Progress, ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import EdgeSpecError
from edge_spec.models import runtimes
from edge_spec.models.resolve import ResolvedModel
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.locks import single_flight
from edge_spec.text.vocabulary import frequent_tokens

# Byte-pair encodings number tokens in the order in which they were joined, the commonest first. Of
# an answer in English or code all but one in ten thousand are among so many of Qwen's; among 65,536
# and 32,768 all but 2 and 6 in a hundred, which costs more than shorter matrices save.
COMMON_TOKENS = 98_304
_OF_WRITING = 2048  # tokens of each, such as Chinese, most of which come late in many vocabularies
_LEAST_SAVED = 1.2  # times what is left, that a file has to have to be cut down
_FOUR_BITS = 4.5 / 8  # bytes of a weight, with its scales
_LEAST_BYTES = 100_000_000  # of a draft that is copied: passes of smaller ones take other time
_MOST_BYTES = 4_000_000_000  # of all copies in the cache

_log = logging.getLogger(__name__)


def cheapest(
    draft: ResolvedModel, source: Source, progress: Progress, makes: bool = True
) -> ResolvedModel:
    """Returns the draft as its passes take least time: with the copy in 4 bits that the cache has
    of it, and with scores of common tokens. Only where kernels of ours compute it: others were not
    compared. makes: the copy, where there is none."""
    if draft.runtime.reads != "gguf" or not runtimes.own_kernels(draft.runtime.name):
        return draft
    small = _in_four_bits(draft, source, progress, makes)
    return replace(small, scored_tokens=_common_tokens(draft))


def _in_four_bits(
    draft: ResolvedModel, source: Source, progress: Progress, makes: bool
) -> ResolvedModel:
    """Returns the draft itself where that saves little, or cannot be."""
    info: ModelInfo = draft.source
    if not (draft.as_it_is and _is_large(info)):
        return draft
    kept = _copy_of(source)
    if not (makes or kept.is_file()):
        return draft
    exporter = runtimes.load_exporter("gguf")
    if not isinstance(exporter, Requantizes):
        return draft
    try:
        _make(kept, info.path, exporter, progress)
        copied = runtimes.open_model_info(kept)
    except (EdgeSpecError, OSError) as error:
        _log.warning("the draft %s stays as it is: %s", draft.name, error)
        return draft
    return replace(draft, source=copied, as_it_is=False)


def _common_tokens(draft: ResolvedModel) -> ScoredTokens | None:
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


def _copy_of(source: Source) -> Path:
    return cache_directory() / "drafts" / f"{source.name}-{source.identity}-Q4_0.gguf"


def _make(copy: Path, path: Path, exporter: Requantizes, progress: Progress) -> None:
    """Makes the copy of a file where there is none. Raises an EdgeSpecError, OSError."""
    if not copy.is_file():
        folder = copy.parent
        folder.mkdir(parents=True, exist_ok=True)
        waiting = partial(progress, "Waiting for another process that makes a copy", 0.0)
        with single_flight(copy, waiting):
            if not copy.is_file():
                with atomic_file(copy) as unfinished:
                    exporter.requantize(path, unfinished, "Q4_0", progress)
                _make_room(folder, copy)
    with suppress(OSError):
        copy.touch()  # the last one to go


def _make_room(folder: Path, newest: Path) -> None:
    """Removes copies that were not used for longest, until the others take little."""
    found = []
    for path in folder.glob("*.gguf"):
        with suppress(OSError):  # another process has removed it
            found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= _MOST_BYTES:
            return
        if path != newest:
            with suppress(OSError):
                path.unlink()
                left -= size
