"""Sessions of models that mix attention and recurrent layers, such as Qwen 3.5.

A recurrent layer has one state for all text. The library keeps the states after a pass's last rows,
so that rejected draft tokens can be dropped before the next pass. A longer rollback reads text
again from the last saved place: states then come from the same passes with and without drafting.
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

MAX_PLACES, MAX_BYTES = 16, 400_000_000  # per session


@dataclass(eq=False)
class Place:
    """A saved state of recurrent layers, [bytes] uint8 in the library's format. was_used: whether
    text resumed here."""

    length: int
    state: np.ndarray
    was_used: bool = False


class Places:
    """The saved places of a text. Beyond a bound of memory, the first one that was never of use
    goes, and the lowest only after those: most texts that share its beginning resume there."""

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
        return next((each for each in reversed(self._places) if each.length <= length), None)

    def cut(self, length: int) -> None:
        while self._places and self._places[-1].length > length:
            self._places.pop()

    def _is_over(self) -> bool:
        num_bytes = sum(each.state.nbytes for each in self._places)
        return len(self._places) > MAX_PLACES or (len(self._places) > 1 and num_bytes > MAX_BYTES)


KEPT_STATES = 7  # per layer, besides the last: rows that can be dropped
# Architectures whose states llama.cpp keeps reliably in random passes, commits and rollbacks.
# Nemotron-H was not tested.
REWINDABLE = frozenset({"qwen35", "qwen35moe", "lfm2", "lfm2moe"})
_STATE = {"text": np.int32, "sequence": np.uint8, "places": np.int64, "states": np.uint8}
_TRIED_TOKENS = 256  # of a trial context


class HybridSession(LlamaCppSession):
    """Keeps the committed text so that it can be read again."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._most_rows = cache.choices.kept_states + 1
        self._text: list[int] = []  # perhaps with uncommitted tokens
        self._saved: np.ndarray | None = None  # the committed sequence
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
        """Read the text up to `length` again if that drops committed tokens."""
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
        """Return "text" [length] int32, "sequence" [bytes] uint8 in the library's format, "places"
        [count] int64 and their "states" [bytes] uint8, of equal size: the last places whose states
        together are no larger than the sequence."""
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
        """Raises ValueError unless they are in the format of `state`."""
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
        """Drop a pass's rejected rows. If all were, the library silently has no state: read the
        text again and save it for the next time."""
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
        """Read the text again from the last place before `length`. Raises SessionError, keeping
        what was read."""
        text = self._text[:length]
        self._sequence.hold(self._go_back(length))
        self._places.cut(self.length)
        self.prefill(text[self.length :])

    def _go_back(self, length: int) -> int:
        """Return the length still cached."""
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
    """Raises UnsupportedModelError if the library may not keep states."""
    if architecture not in REWINDABLE:
        raise _no_states(path)


def rewindable(weights: GgufWeights, choices: ContextChoices, path: object) -> ContextChoices:
    """Return options with the kept states that a trial context accepts, at most KEPT_STATES. Raises
    UnsupportedModelError for none."""
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
