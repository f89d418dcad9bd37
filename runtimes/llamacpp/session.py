"""One conversation on a model of llama.cpp."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.features import OnPrefilled, require_layers, require_none_alone
from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.cache import Cache, SequenceRows
from edge_spec.runtimes.llamacpp.features import Features, KeysValues, new_tap
from edge_spec.runtimes.llamacpp.library import PREFILL_TOKENS
from edge_spec.runtimes.llamacpp.transfer import holds_windowed, is_sequence

_NOTHING = np.empty(0, np.uint8)


class LlamaCppSession:
    """A conversation in its own or a shared cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._weights = cache.weights
        self._sequence = cache.join()
        self._untold: np.ndarray | None = None  # of unscored rows, until they are committed
        self._collected = weakref.finalize(self, cache.leave, self._sequence)

    @property
    def length(self) -> int:
        return self._sequence.length

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._cache.context_length)
        self._cache.settle(self._sequence, len(tokens))
        for start in range(0, len(tokens), PREFILL_TOKENS):
            tree = TokenTree.chain(tokens[start], tokens[start + 1 : start + PREFILL_TOKENS])
            self._score(tree, is_scored=False)
            self.commit(range(len(tree)))
        if len(tokens):
            self._sequence.home.wait()  # so that clocks read next are right

    def forward(self, tree: TokenTree) -> Forward:
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        require_room(self.length, rows, self._cache.context_length)
        return self._score(tree, is_scored=True)

    def _score(self, tree: TokenTree, is_scored: bool) -> Forward:
        self._untold = None
        [out] = self._cache.score([SequenceRows(self._sequence, tree, is_scored)])
        self._untold = None if is_scored else out.features
        return out

    def commit(self, rows: Sequence[int]) -> None:
        sequence = self._sequence
        before = sequence.outcome[0]
        if not sequence.has_rows:
            raise ValueError("the rows of the last pass are gone")
        if sequence.keys_values is not None:
            sequence.keys_values.commit(rows, before)
        sequence.outcome = (before + len(rows), tuple(rows))
        sequence.has_rows = False
        untold, self._untold = self._untold, None
        if untold is not None and sequence.features is not None and len(rows):
            kept = untold if len(rows) == len(untold) else untold[np.asarray(rows)]
            sequence.features.on_prefilled(before, kept)

    def rollback(self, length: int) -> None:
        """Raises SessionError if a sliding window has dropped tokens needed then."""
        sequence, window = self._sequence, self._weights.state_window
        require_rollback(self.length, length)
        if window and length < self.length:
            start = sequence.home.first_position(sequence.number)
            if length and start > max(0, length - window):  # earlier tokens are out of the window
                raise SessionError(
                    f"llama.cpp holds this text from token {start} on only, so that it cannot go "
                    f"back to token {length}",
                    remedy="Begin a new conversation.",
                )
        sequence.outcome = (length, sequence.outcome[1] or ())
        sequence.has_rows = False
        if sequence.keys_values is not None:
            sequence.keys_values.cut(length)

    @property
    def collects(self) -> bool:
        return self._sequence.features is not None or self._sequence.keys_values is not None

    @property
    def shares_features(self) -> bool:
        """See `edge_spec.core.features.SharesFeatures`. Keys and values need passes of one
        session."""
        return self._sequence.keys_values is None

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """See `edge_spec.core.features.GivesFeatures`. llama.cpp returns a prompt's final states
        only with its logits, which take time and memory."""
        require_layers(layers, self._weights.config.num_layers)
        wanted = Features(self._weights, layers, on_prefilled) if layers else None
        self._cache.collect(self._sequence, wanted)
        self._untold = None

    def share_keys_values(self, layers: Sequence[int]) -> None:
        shared = KeysValues(self._weights.config, layers) if layers else None
        if shared is not None:
            self._cache.require_tap(new_tap(self._weights, PREFILL_TOKENS))
        self._sequence.keys_values = shared

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        shared = self._sequence.keys_values
        return shared.of(layer) if shared is not None and shared.length >= self.length else None

    def state(self) -> dict[str, np.ndarray]:
        """Return "sequence" [bytes] uint8 in the library's format, or nothing if that is
        unknown."""
        stored = self._cache.stored(self._sequence)
        return {"sequence": stored} if self._holds(stored, self.length) else {}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        stored = state.get("sequence", _NOTHING)
        expected = {"sequence": (stored.shape[:1], np.uint8)}
        require_state(state, expected, length, self._cache.context_length)
        if not self._holds(stored, length):
            raise ValueError(f"no sequence of {length} tokens")
        self._cache.replace(self._sequence, stored, length)
        if self._sequence.keys_values is not None:
            self._sequence.keys_values.cut(0)

    def close(self) -> None:
        self._sequence.outcome = (0, ())
        self._collected()

    def _holds(self, stored: np.ndarray, length: int) -> bool:
        """Return whether the library can take it for `length` tokens."""
        window = self._weights.state_window
        if window:
            return holds_windowed(stored, length, window)
        return not length or is_sequence(stored, length)


def forward_together(parts: Sequence[PassPart]) -> list[Forward]:
    """Score trees of sessions on one cache in one pass. Raises what `forward` does."""
    sessions = [each.session for each in parts if isinstance(each.session, LlamaCppSession)]
    require_none_alone(sessions)
    if sum(len(part.tree) for part in parts) > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows in one pass")
    cache = sessions[0]._cache
    for session in sessions:
        session._sequence.has_rows = False
    for session, part in zip(sessions, parts, strict=True):
        require_room(session.length, len(part.tree), cache.context_length)
    rows = [
        SequenceRows(session._sequence, part.tree, part.is_scored)
        for session, part in zip(sessions, parts, strict=True)
    ]
    outs = cache.score(rows)
    for session, part, out in zip(sessions, parts, outs, strict=True):
        session._untold = None if part.is_scored else out.features
    return outs
