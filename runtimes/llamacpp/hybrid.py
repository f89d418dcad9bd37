"""Sessions of models whose layers are attention and recurrence in turns, such as Qwen 3.5.

A recurrent layer has one state for all of the text. The library keeps those after each of the last
rows of a pass, so that rejected tokens of a chain can be dropped before the next one. A rollback
into committed text reads it again from the last place before, so that states come from the same
passes with drafts and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_spec.core.model import Capabilities, Forward, require_rollback, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError
from edge_spec.runtimes.llamacpp.cache import Cache
from edge_spec.runtimes.llamacpp.context import RECURRENT, Context
from edge_spec.runtimes.llamacpp.library import ContextChoices
from edge_spec.runtimes.llamacpp.session import LlamaCppSession
from edge_spec.runtimes.llamacpp.transfer import is_sequence
from edge_spec.runtimes.llamacpp.weights import GgufWeights

MAX_PLACES, MAX_BYTES = 16, 400_000_000  # of a session


@dataclass(eq=False)
class Place:
    """state: [bytes] uint8, of the recurrent layers alone, in the library's own form. was_used:
    whether the text has gone on from here before."""

    length: int
    state: np.ndarray
    was_used: bool = False


class Places:
    """The places of one text, within a bound of memory: beyond it, the first one goes that was
    never of use, and the lowest, which most texts with its beginning go on from, last."""

    def __init__(self) -> None:
        self._places: list[Place] = []  # by length

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def add(self, place: Place) -> None:
        self.cut(place.length - 1)
        self._places.append(place)
        while self._is_over():
            unused = (each for each in self._places[1:-1] if not each.was_used)
            self._places.remove(next(unused, self._places[0]))

    def before(self, length: int) -> Place | None:
        """Returns the last one that is not beyond `length`."""
        return next((each for each in reversed(self._places) if each.length <= length), None)

    def cut(self, length: int) -> None:
        """Forgets those beyond."""
        while self._places and self._places[-1].length > length:
            self._places.pop()

    def _is_over(self) -> bool:
        num_bytes = sum(each.state.nbytes for each in self._places)
        return len(self._places) > MAX_PLACES or (len(self._places) > 1 and num_bytes > MAX_BYTES)


KEPT_STATES = 7  # of each layer beside the last one: as many rows of a pass can be dropped
# Whose states llama.cpp keeps as it says: tried in random orders of passes, commits and rollbacks.
# It keeps those of Nemotron-H, too, which was not tried.
REWINDABLE = frozenset({"qwen35", "qwen35moe", "lfm2", "lfm2moe"})
_STATE = {"text": np.int32, "sequence": np.uint8, "places": np.int64, "states": np.uint8}
_TRIED_TOKENS = 256  # of the context that is asked whether it keeps states


class HybridSession(LlamaCppSession):
    """The text that was committed is kept, to be read again."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._most_rows = cache.choices.kept_states + 1
        self._text: list[int] = []  # that the cache may hold, uncommitted tokens included
        self._saved: np.ndarray | None = None  # the sequence of the committed tokens
        self._places = Places()

    def prefill(self, tokens: Sequence[int]) -> None:
        self._drop_rejected()
        self._text[self.length :] = tokens
        super().prefill(tokens)
        self._saved = None

    def forward(self, tree: TokenTree) -> Forward:
        if len(tree) > self._most_rows or not tree.is_chain:
            raise ValueError(
                f"a pass of this model takes a chain of up to {self._most_rows} rows: its "
                "recurrent layers have one state for the text, which branches would share"
            )
        self._drop_rejected()
        self._text[self.length :] = tree.tokens.tolist()
        return super().forward(tree)

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self._saved = None

    def rollback(self, length: int) -> None:
        """Reads the text up to `length` again, where it is not the one that is committed."""
        require_rollback(self.length, length)
        if length < self.length:
            self._read_again(length)

    def keep_place(self) -> None:
        self._drop_rejected()
        context = self._cache.settle(self._sequence)
        self._places.add(Place(self.length, context.read(0, RECURRENT)))

    def place_before(self, length: int) -> int:
        if length >= self.length:
            return self.length
        place = self._places.before(length)
        return 0 if place is None else place.length

    def state(self) -> dict[str, np.ndarray]:
        """ "text" [length] int32; "sequence" [bytes] uint8, in the library's own form; "places"
        [count] int64 and "states" [bytes] uint8, all of one size: of the last places, as many as
        take no more than the sequence."""
        self._drop_rejected()
        sequence = self._cache.stored(self._sequence)
        if not self._holds(sequence, self.length):
            return {}
        places = list(self._places)
        while sum(place.state.nbytes for place in places) > len(sequence):
            places.pop(0)
        states = [place.state for place in places]
        return {
            "text": np.array(self._text[: self.length], np.int32),
            "sequence": sequence,
            "places": np.array([place.length for place in places], np.int64),
            "states": np.concatenate([*states, np.empty(0, np.uint8)]),
        }

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        counts = {name: state[name].shape[:1] for name in _STATE if name in state}
        expected = {name: (counts.get(name, (0,)), kind) for name, kind in _STATE.items()}
        expected["text"] = ((length,), np.int32)
        require_state(state, expected, length, self._cache.context_length)
        places = self._checked_places(state["places"].tolist(), state["states"], length)
        super().restore({"sequence": state["sequence"]}, length)
        self._text, self._places, self._saved = state["text"].tolist(), places, None

    def _holds(self, stored: np.ndarray, length: int) -> bool:
        return not length or is_sequence(stored, length, is_recurrent=True)

    def _checked_places(self, lengths: list[int], states: np.ndarray, length: int) -> Places:
        """Raises ValueError for what is not in the form of `state`."""
        size = len(states) // max(1, len(lengths))
        places = Places()
        for index, each in enumerate(lengths):
            own = states[index * size : (index + 1) * size]
            after = lengths[index - 1] if index else 0
            known = is_sequence(own, each, caches=0, is_recurrent=True)
            if not after < each <= length or not known or size * len(lengths) != len(states):
                raise ValueError(f"no state of {each} tokens")
            places.add(Place(each, own))
        return places

    def _drop_rejected(self) -> None:
        """Drop what was rejected of a pass. Where all of it was, the library has no state, and does
        not say so: the text is read again, and saved for the next time."""
        sequence, length = self._sequence, self.length
        pending, chosen = sequence.pending, sequence.outcome[1]
        if pending is None or length == len(sequence.cells) + len(pending.cells):
            return
        context = sequence.home
        if chosen and context.remove(0, length):
            sequence.hold(length)
            return
        if self._saved is None:
            self._read_again(length)
            self._saved = self._cache.stored(sequence)
        else:
            sequence.hold(length)
            context.remove(0)
            context.write(self._saved, 0)

    def _read_again(self, length: int) -> None:
        """Go back to the last place before that length and read the text from there. Raises
        SessionError with what was read until then."""
        text = self._text[:length]
        self._sequence.hold(self._go_back(length))
        self._places.cut(self.length)
        self.prefill(text[self.length :])

    def _go_back(self, length: int) -> int:
        """Returns the length of the text that the cache then holds."""
        context = self._cache.require_open(self._sequence)
        place = self._places.before(length)
        if place is not None:
            place.was_used = True
            context.write(place.state, 0, RECURRENT)
            if context.remove(0, place.length):
                return place.length
        context.remove(0)
        return 0


def require_known_hybrid(architecture: str, path: object) -> None:
    """Raises UnsupportedModelError where the library is known to keep no states."""
    if architecture not in REWINDABLE:
        raise _no_states(path)


def rewindable(weights: GgufWeights, choices: ContextChoices, path: object) -> ContextChoices:
    """Return the choices of contexts that keep as many states as the library agrees to when a small
    one is opened, KEPT_STATES at most. Raises UnsupportedModelError where it keeps none."""
    chosen = replace(choices, num_sequences=1, kept_states=KEPT_STATES)
    tried = Context(weights, replace(chosen, num_tokens=_TRIED_TOKENS))
    kept = weights.library.llama_n_rs_seq(tried.handle)
    tried.free()
    if kept < 1:
        raise _no_states(path)
    return replace(chosen, kept_states=min(kept, KEPT_STATES))


def rewindable_capabilities(found: Capabilities, choices: ContextChoices) -> Capabilities:
    kept = choices.kept_states
    return replace(found, max_rows=kept + 1, trees=False, rollback_rows=kept)


def _no_states(path: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} has layers with a recurrent state, which llama.cpp does not take back reliably "
        "in this architecture: speculation and chat need that",
        remedy=f"Use a model of attention alone, or of {', '.join(sorted(REWINDABLE))}.",
    )
