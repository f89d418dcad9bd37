"""Takes and restores snapshots of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_spec.core.model import Restorable
from edge_spec.core.session_errors import translate_errors
from edge_spec.engine.components import EngineComponents
from edge_spec.engine.conversation import Conversation
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.drafter_switch import DrafterSwitch
from edge_spec.engine.prompt_cache import PREFILL_TOKENS, KeptState
from edge_spec.engine.snapshot_file import Description, Snapshot
from edge_spec.engine.speculation import Speculation
from edge_spec.errors import ContextFullError, EdgeSpecError, SnapshotError, UsageError


def take_snapshot(
    parts: EngineComponents,
    conversation: Conversation,
    drafting: DrafterSwitch,
    note: Mapping[str, Any] | None,
) -> Snapshot:
    """Return the conversation between two answers as a snapshot. Raises UsageError for a note that
    JSON cannot hold, SessionError if the target fails."""
    description = Description(
        model=parts.name,
        fingerprint=fingerprint(parts),
        computing=parts.computing,
        drafts=_drafts(parts),
        exact=parts.speculation_factory.lossless.is_exact,
        noise=conversation.noise,
        plain_s=conversation.plain_rate.seconds,
        learnt=drafting.stats(),
        note=_checked_note(note),
    )
    return Snapshot(
        description,
        np.array(conversation.tokens, np.int32),
        _target_state(conversation),
        drafting.speculation.state(),
    )


def check_snapshot(snapshot: Snapshot, parts: EngineComponents, context_length: int) -> None:
    """Raise SnapshotError for another model's snapshot, ContextFullError if it is too long."""
    description, tokens = snapshot.description, snapshot.tokens
    if description.fingerprint != fingerprint(parts):
        raise SnapshotError(
            f"the snapshot was made with {description.model}, not with {parts.name} as it is now",
            remedy="Load that model, unchanged since then.",
        )
    vocab_size = parts.model.config.vocab_size
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise SnapshotError(
            f"the snapshot has tokens outside the vocabulary of {vocab_size}",
            remedy="Restore another snapshot.",
        )
    if len(tokens) > context_length:
        raise ContextFullError(
            f"the snapshot has {len(tokens)} tokens, the context holds {context_length}",
            remedy="Load the model with a longer context.",
        )


def take_over(
    snapshot: Snapshot, parts: EngineComponents, conversation: Conversation, drafting: DrafterSwitch
) -> None:
    """Replace the conversation by a checked snapshot, between two answers. Raises SnapshotError,
    changing nothing, if a session or drafter rejects its part."""
    speculation, learnt = drafting.speculation, snapshot.description.learnt
    before = speculation.state()
    try:
        speculation.load_stats(learnt)
        speculation.load(_drafters_state(snapshot, parts, speculation))
        _restore_target(snapshot, parts, conversation)
    except BaseException as error:
        conversation.failed |= isinstance(error, EdgeSpecError)
        speculation.load(before)
        if isinstance(error, (KeyError, ValueError)):
            raise SnapshotError(
                f"the snapshot does not fit {parts.name} on {parts.runtime}: {error}",
                remedy="Restore another snapshot.",
            ) from error
        raise
    drafting.remember(learnt)
    if snapshot.description.computing == parts.computing:
        conversation.plain_rate.restore(snapshot.description.plain_s)


def fingerprint(parts: EngineComponents) -> str:
    """Return a hash of the model's files, architecture and vocabulary, for any context length."""
    architecture = {**parts.model.config.to_dict(), "context_length": 0}
    vocabulary = sorted(parts.text.tokenizer.vocabulary().items())
    described = json.dumps([parts.identity, architecture, vocabulary], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def _drafts(parts: EngineComponents) -> tuple[str, ...]:
    return tuple(draft.identity for draft in parts.drafts)


def _target_state(conversation: Conversation) -> dict[str, np.ndarray]:
    target = conversation.decoder.target
    if not isinstance(target, Restorable):
        return {}
    try:
        with translate_errors:
            return target.state()
    except EdgeSpecError:
        conversation.failed = True
        raise


def _checked_note(note: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if note is None:
        return None
    try:
        checked: dict[str, Any] = json.loads(json.dumps(dict(note), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the note of a snapshot is no JSON object: {error}",
            remedy="Give a dictionary of JSON.",
        ) from None
    return checked


def _drafters_state(
    snapshot: Snapshot, parts: EngineComponents, speculation: Speculation
) -> dict[str, np.ndarray]:
    """Return the state of current drafters; model drafters only if the draft models are the
    same."""
    same = snapshot.description.drafts == _drafts(parts)
    known = {each.name for each in speculation.drafters if same or not each.traits.draft_model}
    state = snapshot.drafters
    return {name: array for name, array in state.items() if name.partition("/")[0] in known}


def _restore_target(
    snapshot: Snapshot, parts: EngineComponents, conversation: Conversation
) -> None:
    """Load the kept cache, or read the text again. Raises ValueError if it is no cache."""
    tokens, target = snapshot.tokens.tolist(), conversation.decoder.target
    if isinstance(target, Restorable) and _is_usable(snapshot, parts, conversation.decoder):
        conversation.restore(KeptState(snapshot.tokens, snapshot.cache))
        conversation.noise = snapshot.description.noise
        return
    conversation.reuse(tokens)
    try:
        while target.length < len(tokens):
            with translate_errors:
                target.prefill(tokens[target.length : target.length + PREFILL_TOKENS])
    finally:
        conversation.tokens = tokens[: target.length]


def _is_usable(snapshot: Snapshot, parts: EngineComponents, decoder: Decoder) -> bool:
    """Return True if this engine could have computed the cache: no noisier than it promises, and
    without noise in passes of the same widths."""
    description = snapshot.description
    if not snapshot.cache or description.computing != parts.computing:
        return False
    same_width = description.exact == parts.speculation_factory.lossless.is_exact
    return description.noise <= decoder.tie_margin and (decoder.tie_margin > 0 or same_width)
