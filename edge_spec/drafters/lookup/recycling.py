"""Token recycling: what the target last found likely after a token (Luo et al. 2024).

An adjacency table holds the best next tokens of every scored row, rejected ones included. Unlike
the paper's fixed tree, rows are chosen by their chance, from a token's rank and logit gap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.protocol import (
    GREEDY,
    TRAITS,
    Budget,
    continues,
    restored_prompt,
)
from edge_spec.drafters.tree_builder import Candidate, LearningDrafter, grow, nothing

TOP_TOKENS = 8
# Below 2 MB for any vocabulary; the tokens scored longest ago are dropped.
MAX_TABLE_TOKENS = 4096

# Kinds of draft token: ranks 0, 1, 2 and the rest, each by the logit gap (to the second best for
# rank 0, else to the best). Priors measured over greedy texts of a 135M chat model on six kinds of
# prompts.
_GAPS = (0.5, 1.0, 2.0, 4.0, 8.0)
_PRIORS = (
    (0.38, 0.42, 0.50, 0.63, 0.72, 0.75),
    (0.13, 0.11, 0.09, 0.07, 0.05, 0.04),
    (0.07, 0.06, 0.04, 0.04, 0.03, 0.03),
    (0.06, 0.04, 0.02, 0.02, 0.02, 0.01),
)

_NUM_KINDS = len(_PRIORS) * len(_PRIORS[0])
# By rank; the last ones share a kind.
_FIRST_KINDS = np.minimum(np.arange(TOP_TOKENS), len(_PRIORS) - 1) * len(_PRIORS[0])

_BLOCK = 64  # tokens whose maximum is compared first


def top_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    """Return [rows, count] ids of the largest logits of each row, descending. Searches only the
    blocks with the largest maxima, about ten times faster than partitioning a whole vocabulary."""
    rows, vocab_size = logits.shape
    num_blocks = vocab_size // _BLOCK
    if num_blocks <= count:
        return np.argsort(-logits, axis=1, kind="stable")[:, :count]
    whole = num_blocks * _BLOCK
    maxima = logits[:, :whole].reshape(rows, _BLOCK, num_blocks).max(axis=1)
    blocks = np.argpartition(maxima, -count, axis=1)[:, -count:]
    members = np.arange(_BLOCK) * num_blocks
    candidates = (blocks[:, :, None] + members).reshape(rows, -1)
    if whole < vocab_size:
        left = np.broadcast_to(np.arange(whole, vocab_size), (rows, vocab_size - whole))
        candidates = np.hstack([candidates, left])
    # Plain indexing takes a fifth of np.take_along_axis's time.
    each = np.arange(rows)[:, None]
    values = logits[each, candidates]
    best = np.argpartition(values, -count, axis=1)[:, -count:]
    best = best[each, np.argsort(-values[each, best], axis=1)]
    found: np.ndarray = candidates[each, best]
    return found


class RecyclingDrafter(LearningDrafter):
    name = "recycling"
    traits = TRAITS["recycling"]

    def __init__(self) -> None:
        super().__init__([prior for row in _PRIORS for prior in row])
        # By token, latest last: [2, draft tokens] int32, ids and kinds.
        self._table: OrderedDict[int, np.ndarray] = OrderedDict()
        self._prompt: tuple[int, ...] = ()

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        """Clear the table unless the prompt continues the conversation."""
        if not continues(self._prompt, prompt):
            self._table.clear()
            self._acceptance.begin_text()
        self._prompt = tuple(prompt)
        super().begin(prompt, sampler)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._growth = grow(self.name, pending, budget, self._acceptance, pending, self._expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        logits = out.logits[: len(tree)]
        best = top_tokens(logits, min(TOP_TOKENS, logits.shape[1]))
        values = logits[np.arange(len(tree))[:, None], best]
        gaps = values[:, :1] - values
        if gaps.shape[1] > 1:
            gaps[:, 0] = gaps[:, 1]
        kinds = _FIRST_KINDS[: best.shape[1]] + np.searchsorted(_GAPS, gaps, side="right")
        entries = np.stack([best, kinds], axis=1).astype(np.int32)
        # The text's rows last: they have the right context.
        kept = verdict.kept
        rejected = [row for row in range(len(tree)) if row not in kept]
        for row in (*rejected, *kept):
            token = int(tree.tokens[row])
            self._table[token] = entries[row].copy()  # a view would keep all rows in memory
            self._table.move_to_end(token)
        while len(self._table) > MAX_TABLE_TOKENS:
            self._table.popitem(last=False)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Skip the costly search for likely tokens."""
        self._growth = nothing(verdict.next_token)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        learnt = super().state(learnt_only)
        if learnt_only:
            return learnt
        entries = list(self._table.values())
        return {
            **learnt,
            "prompt": np.array(self._prompt, np.int32),
            "tokens": np.array(list(self._table), np.int32),
            "entries": np.stack(entries) if entries else np.empty((0, 2, 0), np.int32),
        }

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Load a snapshot; changes nothing if it raises."""
        if learnt_only:
            return super().load(state, learnt_only)
        prompt = restored_prompt(state["prompt"])
        tokens, entries = state["tokens"], state["entries"]
        if (
            {tokens.dtype.kind, entries.dtype.kind} != {"i"}
            or (tokens.ndim, entries.ndim) != (1, 3)
            or entries.shape[:2] != (len(tokens), 2)
            or not np.isin(entries[:, 1], range(_NUM_KINDS)).all()
        ):
            raise ValueError(f"a table of shape {entries.shape} for tokens of {tokens.shape}")
        super().load(state)
        self._prompt = prompt
        rows = (entry.astype(np.int32) for entry in entries)  # copied, as above
        self._table = OrderedDict(zip(tokens.tolist(), rows, strict=True))

    def _expand(self, token: int) -> list[Candidate[int]]:
        if token not in self._table:
            return []
        ids, kinds = self._table[token].tolist()
        return [
            Candidate(candidate, kind, candidate)
            for candidate, kind in zip(ids, kinds, strict=True)
        ]
