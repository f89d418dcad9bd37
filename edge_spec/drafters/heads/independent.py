"""Drafts of heads that know nothing of what the heads before them have drafted, so that any of a
head's tokens may follow any of those before: the tree holds the likeliest paths, by the product of
the heads' own chances.

Medusa heads (Cai et al. 2024) each predict one token further ahead, all from the state in which the
target chose the pending token. Heads of blocks read a text's features once, keep keys and values of
it, and score several rows after the text in one pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import HeadBackend, HeadMatrix, HeadScores, MedusaHead, MedusaStep
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_tree import (
    PRIORS,
    SIBLINGS,
    candidates_after,
    kinds_of,
    ranked,
)
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.heads.eagle_session import WINDOW, TargetFeatures
from edge_spec.drafters.heads.layers import FloatProducts, spread
from edge_spec.drafters.lookup.recycling import top_tokens
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits
from edge_spec.drafters.tree_builder import Candidate, LearningDrafter, grow, nothing


class RowScores(NamedTuple):
    """Holds what heads say of one draft token: see `HeadScores`."""

    logits: np.ndarray  # [scored tokens]
    likeliest: np.ndarray  # [some] int64
    shares: np.ndarray  # [some]
    state: np.ndarray | None  # [hidden_size], where asked for


class IndependentHeads(Protocol):
    """Heads whose draft tokens are independent of each other."""

    @property
    def num_heads(self) -> int:
        """Tokens that they draft at most, one after the other."""

    @property
    def shares_output(self) -> bool:
        """Says whether those of all heads are scored in one go."""

    @property
    def reported_acceptance(self) -> Sequence[float]:
        """See Drafter."""

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """scores: [..., scored tokens] -> [..., vocab], -inf for tokens that are not scored."""


class IndependentDrafter(LearningDrafter):
    """A head is asked when the tree first gets to its depth; where all are scored in one go, all
    that the budget has room for are."""

    def __init__(self, network: IndependentHeads, name: str) -> None:
        super().__init__(PRIORS)
        self.name, self.reported_acceptance = name, network.reported_acceptance
        self._heads = network
        self._count = 0  # of draft tokens, at most
        self.passes: int = 0
        self._told: dict[int, RowScores] = {}  # by head
        self._likeliest: dict[Hashable, list[tuple[int, int]]] = {}
        self._sampler = Sampler(SamplingParams(), ())

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._told, self._likeliest, self.passes = {}, {}, 0
        self._count = budget.num_draft_tokens
        if self._heads.shares_output:  # what is deeper comes with the same pass
            budget = replace(budget, min_reach=budget.worth_scoring)
        root: Path = ()
        self._growth = nothing(pending)
        if budget.num_draft_tokens > 0 and self._is_ready:
            self._growth = grow(self.name, pending, budget, self._acceptance, root, self._expand)
        return self._growth.tree

    @property
    def _is_ready(self) -> bool:
        """Says whether heads have what they draft from."""
        raise NotImplementedError

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Returns what these heads say after the pending token; where all are scored in one go,
        they are the first ones."""
        raise NotImplementedError

    def _decided_by(self, path: Path) -> Hashable:
        """Returns what decides which tokens are likely after these draft tokens."""
        return len(path)

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        if len(path) == self._heads.num_heads:
            return []
        decided_by = self._decided_by(path)
        if decided_by not in self._likeliest:
            self._likeliest[decided_by] = self._ranked(self._row(len(path)), path)
        return candidates_after(path, self._likeliest[decided_by])

    def _row(self, index: int) -> RowScores:
        """Returns what a head says."""
        if index not in self._told:
            all_heads = range(max(index + 1, min(self._heads.num_heads, self._count)))
            heads = all_heads if self._heads.shares_output else [index]
            self.passes += 1
            found = self._ask(heads)
            for row, head in enumerate(heads):
                state = None if found.states is None else found.states[row]
                told = found.logits[row], found.likeliest[row], found.shares[row]
                self._told[head] = RowScores(*told, state)
        return self._told[index]

    def _ranked(self, row: RowScores, path: Path) -> list[tuple[int, int]]:
        """(token, kind of draft token) of a row's likeliest tokens, in falling order."""
        if self._sampler.prefers_by_logits:
            return kinds_of(row.likeliest[:SIBLINGS], row.shares[:SIBLINGS])
        return ranked(self._weigh(self._heads.spread(row.logits)))

    def _weigh(self, logits: np.ndarray) -> np.ndarray:
        """[vocab] what the target would prefer by such logits, whatever was drafted before."""
        sampler = self._sampler
        return (sampler.probs if sampler.sampled_drafts else sampler.preference)(logits, ())


def head_scores(logits: np.ndarray, count: int = SIBLINGS) -> HeadScores:
    """logits: [heads, scored tokens]; count: of the likeliest ones. Shares are NaN where logits
    are."""
    likeliest = top_tokens(logits, min(count, logits.shape[1]))
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = np.take_along_axis(powers, likeliest, axis=1) / powers.sum(axis=1, keepdims=True)
    return HeadScores(logits, likeliest, shares)


_ROWS_AT_ONCE = 256


class ReadsFeatures(Protocol):
    """A head that reads its target's features."""

    @property
    def config(self) -> ModelConfig:
        """Returns the config of its layers."""

    @property
    def feature_layers(self) -> Sequence[int]:
        """See `core.features`."""

    @property
    def features_size(self) -> int:
        """Counts the numbers of all features of a token beside each other."""


class BlockDrafter(IndependentDrafter):
    """head: drafters of several conversations share it. window: entries that a row sees."""

    _tokens_after = 0  # that an entry reads beside the features of the token before them

    def __init__(
        self, head: ReadsFeatures, heads: IndependentHeads, name: str, window: int = WINDOW
    ) -> None:
        super().__init__(heads, name)
        self._window = window
        self._target = TargetFeatures(head.feature_layers, head.features_size, window)
        config, self._pending = head.config, 0
        shape = (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim)
        self._cache = np.zeros(shape, np.float32)
        self._bind(self._cache)
        self._first = self._end = 0  # features that the cache has entries of, from slot 0 on

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)
        self._forget(0)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._forget(self._target.begin(prompt) - self._tokens_after)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._pending = pending
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._target.observe(out, verdict)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._target.forget()
        self._forget(0)

    def close(self) -> None:
        self._target.close()
        super().close()

    @property
    def _is_ready(self) -> bool:
        return self._target.is_ready

    def _bind(self, cache: np.ndarray) -> None:
        """Computes with this cache from now on."""
        raise NotImplementedError

    def _read(self, start: int, end: int, num_asked: int) -> HeadScores:
        """Makes the entries of features from `start` to before `end`, and scores as many draft
        tokens after them, if any."""
        raise NotImplementedError

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Reads what is missing of the text, too, at most its last ones, as many as a row sees."""
        store, end = self._target.store, len(self._target.text) - 1
        if self._end < max(store.first, end - 2 * self._window):  # nobody knows what is between
            self._first = self._end = max(store.first, end - self._window)
        while end - self._end > _ROWS_AT_ONCE:
            self._read_to(self._end + _ROWS_AT_ONCE, 0)
        return self._read_to(end, len(heads))

    def _read_to(self, end: int, num_asked: int) -> HeadScores:
        self._make_room(end - self._end + self._extra_rows(num_asked))
        found = self._read(self._end, end, num_asked)
        self._end = end
        return found

    def _extra_rows(self, num_asked: int) -> int:
        """Counts entries beyond the text's that a pass makes in the cache."""
        return 0

    def _make_room(self, count: int) -> None:
        """Makes room for more entries. A text of twice the window is cut to it."""
        surplus = self._end - self._first - self._window
        if surplus > self._window:
            self._cache = self._cache[..., surplus:, :].copy()
            self._first += surplus
        missing = self._end - self._first + count - self._cache.shape[3]
        if missing > 0:
            grown = max(missing, _ROWS_AT_ONCE)
            self._cache = np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)])
        if surplus > self._window or missing > 0:
            self._bind(self._cache)

    def _forget(self, end: int) -> None:
        """Forgets the entries from this position on."""
        self._end = max(min(self._end, end), self._first)
        if self._end == self._first:
            self._first = self._end = 0


class MedusaNetwork:
    """Weights of heads, and what computes with them. backend: what computes its step; by default
    numpy does, in float32."""

    kind = MedusaHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, head: MedusaHead, backend: HeadBackend | None = None) -> None:
        self.num_heads = head.num_heads
        self.shares_output = len(head.outputs) == 1
        self._vocab_size, self._token_ids = head.vocab_size, head.token_ids
        matrices = _matrices(head)
        self._step: MedusaStep = (
            MedusaFormulas(head, FloatProducts(matrices))
            if backend is None
            else backend.medusa_step(head, matrices)
        )

    def scores(self, state: np.ndarray, heads: Sequence[int]) -> HeadScores:
        """Returns the likeliest tokens of these heads, in rising order, by their ids of the target.
        state: [hidden_size] after the target's final norm."""
        found = self._step(state, heads)
        if self._token_ids is None:
            return found
        return replace(found, likeliest=self._token_ids[found.likeliest])

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """See IndependentHeads."""
        return spread(scores, self._token_ids, self._vocab_size)

    def logits(self, state: np.ndarray, heads: Sequence[int]) -> np.ndarray:
        """[heads, vocab] float32, -inf for tokens that are not scored."""
        return self.spread(self.scores(state, heads).logits)


class MedusaFormulas:
    """W (z + SiLU(A z + b)) for each head's own A and b, and its own W or one that all share: what
    drafts where there is no backend, and what its steps are compared with."""

    def __init__(self, head: MedusaHead, products: FloatProducts) -> None:
        self._num_blocks = [len(blocks) for blocks in head.blocks]
        self._shares_output = len(head.outputs) == 1
        self._products = products

    def __call__(self, state: np.ndarray, heads: Sequence[int]) -> HeadScores:
        """See MedusaStep."""
        states = np.concatenate([self._after_blocks(state[None], head) for head in heads])
        if self._shares_output:  # in one go: its weights are read once
            return head_scores(self._products("output.0", states))
        rows = zip(heads, states, strict=True)
        each = [self._products(f"output.{head}", z[None]) for head, z in rows]
        return head_scores(np.concatenate(each))

    def _after_blocks(self, state: np.ndarray, head: int) -> np.ndarray:
        """state: [1, hidden_size]"""
        for block in range(self._num_blocks[head]):
            inner = self._products(f"{head}.{block}", state)
            state = state + inner / (1 + np.exp(-np.clip(inner, -80, None)))
        return state


def _matrices(head: MedusaHead) -> dict[str, HeadMatrix]:
    found = {
        f"{index}.{block}": HeadMatrix((partial(np.asarray, weight),), bias)
        for index, blocks in enumerate(head.blocks)
        for block, (weight, bias) in enumerate(blocks)
    }
    return found | {f"output.{index}": each for index, each in enumerate(head.outputs)}


class MedusaDrafter(IndependentDrafter):
    """Drafts nothing in an answer's first round, before which no state is known."""

    traits = DrafterTraits(trees=True, cost=Cost.PASS, hidden_states=True, head="medusa")

    def __init__(self, network: MedusaNetwork, name: str = "medusa") -> None:
        super().__init__(network, name)
        self._network = network
        self._state: np.ndarray | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._state = None

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._state = None
        if out.hidden is not None and verdict.tokens:
            self._state = out.hidden[verdict.kept[-1]].copy()

    @property
    def _is_ready(self) -> bool:
        return self._state is not None

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        assert self._state is not None
        return self._network.scores(self._state, heads)
