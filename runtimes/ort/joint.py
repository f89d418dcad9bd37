"""Passes that several sessions share: rows side by side, attention of each on its own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree, preceding
from edge_spec.models.devices import free_bytes
from edge_spec.runtimes.kv_cache import KvCache
from edge_spec.runtimes.ort.joint_graph import OWN_ROWS, place_suffix
from edge_spec.runtimes.ort.passes import MIN_ATTENDED, Passes
from edge_spec.runtimes.ort.signature import (
    STACKED,
    StackedMask,
    bind_cache,
    bind_output,
    pass_error,
)

PLACES = (2, 4, 8)  # of sessions, that the graph may have
_NOBODYS = TokenTree.chain(0)
_ROOM = 4  # times the size of a bundle's files, that has to be free for its graph once more


class JointGraph:
    """The graph for passes of several sessions, loaded when it is first wanted, where there is
    memory for one more copy of the packed weights: with as many places as were ever wanted.

    open_graph: opens one with a number of places. count_bytes: of the bundle's files.
    """

    def __init__(
        self,
        config: ModelConfig,
        open_graph: Callable[[int], Any],
        count_bytes: Callable[[], int],
    ) -> None:
        self._config = config
        self._open_graph = open_graph
        self._count_bytes = count_bytes
        self._num_places = 1
        self._passes: JointPasses | None = None
        self._lock = Lock()

    def prepare(self, num_sessions: int) -> int:
        """Loads what is missing. Returns how many sessions may share a pass."""
        wanted = min((places for places in PLACES if places >= num_sessions), default=PLACES[-1])
        with self._lock:
            if wanted > self._num_places and self._has_room():
                self._passes = JointPasses(self._open_graph(wanted), wanted, self._config)
                self._num_places = wanted
            return self._num_places

    def score(self, parts: Sequence[tuple[Passes, int, PassPart]], num_rows: int) -> list[Forward]:
        """Scores as `JointPasses.score` does."""
        assert self._passes is not None
        return self._passes.score(parts, num_rows)

    def close(self) -> None:
        with self._lock:
            self._passes, self._num_places = None, 1

    def _has_room(self) -> bool:
        free = free_bytes()
        return free is None or free >= _ROOM * self._count_bytes()


class JointPasses:
    """One graph of `joint_graph`. Each place keeps the cache that it was bound to last; a place
    that a pass has no session for attends to a cache of its own, which nobody reads."""

    def __init__(
        self, inference: onnxruntime.InferenceSession, num_places: int, config: ModelConfig
    ) -> None:
        self._inference = inference
        self._config = config
        self._has_forms = OWN_ROWS + place_suffix(0) in {
            value.name for value in inference.get_inputs()
        }
        self._binding = inference.io_binding()
        self._nobody = KvCache(config, self._has_forms, spare_tokens=1)
        self._nobody.reserve(MIN_ATTENDED, 0)
        self._suffixes = [place_suffix(place) for place in range(num_places)]
        self._bound: list[tuple[KvCache, int] | None] = [None] * num_places
        self._no_bias = np.zeros(0, np.float32)

    def score(self, parts: Sequence[tuple[Passes, int, PassPart]], num_rows: int) -> list[Forward]:
        """One pass. parts: of each session its passes, the tokens that it holds, its tree.

        Raises SessionError, DeviceMemoryError, ContextFullError.
        """
        for passes, start, part in parts:
            passes.prepare_joint(len(part.tree), start)
        places = self._places([passes.cache for passes, _, _ in parts])
        tokens = np.zeros(num_rows, np.int64)
        kept = np.zeros(num_rows, np.int64)  # rows that only widen the pass go on as the first
        row = attended = 0
        for place, at in enumerate(places):
            if at is None:
                attended += self._bind_attention(place, self._nobody, 0, 0, _NOBODYS)
                continue
            passes, start, part = parts[at]
            tree = part.tree
            here = slice(row, row + len(tree))
            tokens[here] = tree.tokens
            kept[here] = attended + np.arange(len(tree))
            attended += self._bind_attention(place, passes.cache, row, start, tree)
            row = here.stop
        return self._run(parts, places, tokens, kept, row)

    def _places(self, caches: Sequence[KvCache]) -> list[int | None]:
        """Returns which part each place has: that of the cache it is bound to, where that is among
        them."""
        places: list[int | None] = [None] * len(self._bound)
        left = []
        held = [None if bound is None else bound[0] for bound in self._bound]
        for at, cache in enumerate(caches):
            known = next((place for place, each in enumerate(held) if each is cache), None)
            if known is None:
                left.append(at)
            else:
                places[known] = at
        free = (place for place, at in enumerate(places) if at is None)
        for at, place in zip(left, free, strict=False):
            places[place] = at
        for place, given in enumerate(places):
            cache = self._nobody if given is None else caches[given]
            bound = (cache, cache.generation)
            if self._bound[place] != bound:
                self._bound[place] = None
                bind_cache(cache, self._binding, self._suffixes[place])
                self._bound[place] = bound
        return places

    def _bind_attention(
        self, place: int, cache: KvCache, row: int, start: int, tree: TokenTree
    ) -> int:
        """row: of the pass, where the tree begins. Returns how many rows the place gives."""
        count = len(tree)
        num_rows = count if self._has_forms else max(count, MIN_ATTENDED)
        own = np.minimum(np.arange(num_rows), count - 1)
        total = start + num_rows
        bias = self._bias(num_rows * total).reshape(1, 1, num_rows, total)
        if self._has_forms:
            mask = StackedMask(count, cache.capacity)
            mask.show(start, None if tree.is_chain else tree.ancestors)
            bias = mask.bias
        elif not tree.is_chain:
            bias = bias.copy()
            bias[0, 0, :, start:] = np.where(tree.ancestors, 0.0, -np.inf)
        if self._has_forms:
            self._bind(place, OWN_ROWS, np.arange(row, row + count))
            self._bind(place, STACKED, np.array([True]))
            self._bind(place, "kept_rows", np.arange(count))
        if self._config.convolving:
            before = preceding(tree.parents, start, self._config.num_preceding)
            self._bind(place, "ancestors", np.ascontiguousarray(before[:, own]))
        if self._has_forms or self._config.convolving:
            self._bind(place, "cached_tokens", np.array([start]))
        self._bind(place, "attention_rows", own if self._has_forms else row + own)
        self._bind(place, "position_ids", (start + tree.depths[own]).astype(np.int64)[None])
        self._bind(place, "attention_bias", bias)
        self._bind(place, "seqlens_k", np.array([total - 1], np.int32))
        self._bind(place, "total_sequence_length", np.array(total, np.int32))
        return count if self._has_forms else num_rows

    def _bind(self, place: int, name: str, values: np.ndarray) -> None:
        self._binding.bind_cpu_input(name + self._suffixes[place], values)

    def _bias(self, size: int) -> np.ndarray:
        """[size] zeros: attention is causal by itself, so a chain needs no more."""
        if size > len(self._no_bias):
            self._no_bias = np.zeros(2 * size, np.float32)
        return self._no_bias[:size]

    def _run(
        self,
        parts: Sequence[tuple[Passes, int, PassPart]],
        places: Sequence[int | None],
        tokens: np.ndarray,
        kept: np.ndarray,
        num_scored: int,
    ) -> list[Forward]:
        """Scores are in arrays of their own: they are read while the next pass runs."""
        binding, config = self._binding, self._config
        logits = np.empty((num_scored, config.vocab_size), np.float32)
        hidden = np.empty((num_scored, config.hidden_size), np.float32)
        binding.bind_cpu_input("input_ids", tokens[None])
        binding.bind_cpu_input("kept_rows", kept)
        binding.bind_cpu_input("logit_rows", np.arange(num_scored, dtype=np.int64))
        bind_output(binding, "logits", logits)
        bind_output(binding, "hidden", hidden)
        try:
            self._inference.run_with_iobinding(binding)
        except Exception as error:
            longest = max(start for _, start, _ in parts)
            raise pass_error(error, len(tokens), longest) from error
        found = [Forward(logits[:0], hidden[:0])] * len(parts)
        row = 0
        for at in places:
            if at is None:
                continue
            passes, _, part = parts[at]
            passes.joined()
            scored = slice(row, row + len(part.tree))
            found[at] = Forward(logits[scored], hidden[scored])
            row = scored.stop
        return found
