"""Passes shared by several sessions, each with attention to its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.ort.caches import HostCache
from edge_spec.runtimes.ort.joint_graph import OWN_ROWS, place_suffix
from edge_spec.runtimes.ort.session import MIN_ATTENDED, HostSession
from edge_spec.runtimes.ort.signature import (
    BIAS,
    Graph,
    StackedMask,
    attention_inputs,
    attention_mask,
    bind_output,
    translated,
)

_PLACES = (2, 4, 8)  # that a graph may have
_NOBODYS = TokenTree.chain(0)


def places_for(num_sessions: int) -> int:
    return min((places for places in _PLACES if places >= num_sessions), default=_PLACES[-1])


class JointPasses:
    """A `joint_graph`. Places stay bound to their last cache; unused ones attend to a dummy."""

    def __init__(
        self, inference: onnxruntime.InferenceSession, num_places: int, config: ModelConfig
    ) -> None:
        self.num_places = num_places
        self._graph = Graph.of(inference)
        self._config = config
        self._has_forms = OWN_ROWS + place_suffix(0) in self._graph.inputs
        self._binding = inference.io_binding()
        self._nobody = HostCache(config, self._has_forms, spare_tokens=1)
        self._nobody.reserve(MIN_ATTENDED, 0)
        self._suffixes = [place_suffix(place) for place in range(num_places)]
        self._bound: list[tuple[HostCache, int] | None] = [None] * num_places

    def score(
        self, sessions: Sequence[HostSession], trees: Sequence[TokenTree], num_rows: int
    ) -> list[Forward]:
        """Score a tree of each session in one pass. Scores are copies, read while the next pass
        runs. Raises SessionError, DeviceMemoryError, ContextFullError."""
        for session, tree in zip(sessions, trees, strict=True):
            session.join(len(tree))
        with translated(num_rows, max(session.length for session in sessions)):
            logits, hidden, spans = self._run(sessions, trees, num_rows)
        for session in sessions:
            session.joined()
        return [Forward(logits[span], hidden[span]) for span in spans]

    def _run(
        self, sessions: Sequence[HostSession], trees: Sequence[TokenTree], num_rows: int
    ) -> tuple[np.ndarray, np.ndarray, list[slice]]:
        """Return logits, hidden states and each session's rows."""
        tokens = np.zeros(num_rows, np.int64)
        kept = np.zeros(num_rows, np.int64)  # padding rows repeat the first
        spans = [slice(0, 0)] * len(trees)
        row = attended = 0
        for place, at in enumerate(self._places([session.cache for session in sessions])):
            if at is None:
                attended += self._bind_attention(place, self._nobody, 0, 0, _NOBODYS)
                continue
            session, tree = sessions[at], trees[at]
            spans[at] = here = slice(row, row + len(tree))
            tokens[here] = tree.tokens
            kept[here] = attended + np.arange(len(tree))
            attended += self._bind_attention(place, session.cache, row, session.length, tree)
            row += len(tree)
        logits = np.empty((row, self._config.vocab_size), np.float32)
        hidden = np.empty((row, self._config.hidden_size), np.float32)
        binding = self._binding
        inputs = {"input_ids": tokens[None], "kept_rows": kept, "logit_rows": np.arange(row)}
        self._graph.bind(binding, inputs)
        bind_output(binding, "logits", logits)
        bind_output(binding, "hidden", hidden)
        self._graph.inference.run_with_iobinding(binding)
        return logits, hidden, spans

    def _places(self, caches: Sequence[HostCache]) -> list[int | None]:
        """Assign sessions to places, to those that have their caches bound if possible."""
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
                cache.bind(self._binding, self._suffixes[place])
                self._bound[place] = bound
        return places

    def _bind_attention(
        self, place: int, cache: HostCache, row: int, start: int, tree: TokenTree
    ) -> int:
        """Bind a place's attention, for a tree at this row. Return the number of attended rows."""
        count = len(tree)
        sees = None if tree.is_chain else tree.ancestors
        num_rows = count if self._has_forms else max(count, MIN_ATTENDED)
        inputs = attention_inputs(self._config, start + tree.depths, sees, start, num_rows)
        if self._has_forms:
            inputs[BIAS] = StackedMask(count, cache.capacity).show(start, sees)
            inputs[OWN_ROWS] = np.arange(row, row + count)
        else:
            inputs[BIAS] = attention_mask(np.dtype(np.float32), num_rows, start, sees)
            inputs["attention_rows"] = row + np.minimum(np.arange(num_rows), count - 1)
        self._graph.bind(self._binding, inputs, self._suffixes[place])
        return num_rows
