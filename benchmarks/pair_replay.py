"""A pair's rounds on a virtual clock: the real loop, policy and draft, on models that take a given
time and are right where a recorded draft was.

`chain.walk` forecasts such rounds in a line of arithmetic each; this decodes them, so that a
forecast can be held against it for pairs of devices that are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import FixedPolicy, Policy
from edge_spec.core.metrics import Stats
from edge_spec.core.model import Capabilities, Forward, Session, require_rollback
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.draft_overlap import OverlappedDrafting, OverlapTrial
from edge_spec.placement.chain import Meanwhile
from edge_spec.testing.scripted import smallest_config

VOCAB = 16
_PROMPT_TOKENS = 2
_SECOND = 0.6  # of what the draft leaves to other tokens, for the second of its ranking
_LEAST_CERTAIN = 0.15  # of a first choice: beyond what each of the others then has
_CERTAIN = 30.0  # logit of the target's choice
_MOST_DRAFT_TOKENS = 15
_CONTEXT = 1 << 16  # tokens; a text is never near it
_CAPABILITIES = Capabilities(max_rows=64, trees=False, rollback=True, hidden_states=False)


@dataclass(frozen=True)
class DraftedText:
    """ranks: of each token of a text, where a draft had it: 0 for its first choice, 1 for its
    second; certainty: the draft's probability of its first choice there."""

    ranks: tuple[int, ...]
    certainty: tuple[float, ...]

    @property
    def hits(self) -> list[bool]:
        return [rank == 0 for rank in self.ranks]


class PairCosts(NamedTuple):
    """Seconds of passes by their rows, with all that a round takes for them. meanwhile: None where
    the two cannot run at the same time."""

    target_s: Callable[[int], float]
    draft_s: Callable[[int], float]
    switch_s: float
    meanwhile: Meanwhile | None


class PairClock:
    """The target's time, and the draft's own while both run."""

    def __init__(self, costs: PairCosts) -> None:
        self.now_s = 0.0
        self.beside_s: float | None = None  # that the draft has run since the target began
        self._costs = costs
        self._draft_is_next = False  # whether the other model ran before

    def __call__(self) -> float:
        return self.now_s

    def target_pass(self, rows: int) -> None:
        self.now_s += self._costs.target_s(rows)
        self._draft_is_next = True

    def draft_pass(self, rows: int) -> None:
        taken_s = self._costs.draft_s(rows)
        if self.beside_s is not None:
            assert self._costs.meanwhile is not None
            self.beside_s += taken_s * self._costs.meanwhile.draft_slowdown
            return
        self.now_s += taken_s + (self._costs.switch_s if self._draft_is_next else 0.0)
        self._draft_is_next = False


class VirtualOverlap(OverlappedDrafting):
    """The draft's passes while the target verifies, on a clock: those that fit into its pass, and
    the one that is on its way when it ends. Runs in one thread, so that it is the same each time.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        trial: OverlapTrial | None,
        clock: PairClock,
        meanwhile: Meanwhile,
    ) -> None:
        super().__init__(drafters, trial)
        self._clock = clock
        self._slowdown = meanwhile.target_slowdown

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        ready = self.begin_round()
        start_s = self._clock.now_s
        yield
        if not ready:
            return
        alone_s = self._clock.now_s - start_s
        self._clock.beside_s = 0.0
        slowed_s = alone_s * self._slowdown
        for drafter in ready:
            drafter.anticipate(lambda: (self._clock.beside_s or 0.0) >= slowed_s)
        beside_s, self._clock.beside_s = self._clock.beside_s, None
        # A draft that had nothing more to read leaves the rest of the pass alone.
        pass_s = alone_s + min(beside_s, slowed_s) * (1 - 1 / self._slowdown)
        self._clock.now_s = start_s + max(pass_s, beside_s)


def decode_pair(
    texts: Sequence[DraftedText],
    costs: PairCosts,
    num_draft_tokens: int | None,
    overlaps: bool | None = None,
    begins_overlapped: bool = True,
) -> list[Stats]:
    """Decodes all texts with one policy, as in one session; their times are virtual.

    num_draft_tokens: of every round; 0 is plain decoding, None what the adaptive policy makes of
    the costs. overlaps: whether the draft goes on while the target verifies; None leaves it to the
    trial that users get, which begins with it or without. Without `costs.meanwhile` it never does.
    """
    clock = PairClock(costs)
    policy = _policy(costs, num_draft_tokens, clock)
    trial = OverlapTrial(begins_overlapped) if overlaps is None else None
    meanwhile = costs.meanwhile if overlaps in (None, True) else None
    all_stats = []
    for i, text in enumerate(texts):
        known = _known(text, seed=i)
        drafters: list[Drafter] = []
        if num_draft_tokens != 0:
            model = VirtualModel(known.tokens, known.drafted, clock.draft_pass)
            session, ahead = model.open_session(), meanwhile is not None
            drafters.append(DraftModelDrafter(model, session, VOCAB, anticipates=ahead))
        overlap = VirtualOverlap(drafters, trial, clock, meanwhile) if meanwhile else None
        target = VirtualSession(known.tokens, known.written, clock.target_pass)
        decoder = Decoder(target, drafters, policy, anticipation=overlap, clock=clock)
        all_stats.append(_decoded(decoder, known))
    return all_stats


def tokens_per_s(all_stats: Sequence[Stats]) -> float:
    seconds = sum(stats.predicted_ms for stats in all_stats) / 1e3
    return sum(stats.predicted_n for stats in all_stats) / seconds


def _policy(costs: PairCosts, num_draft_tokens: int | None, clock: PairClock) -> Policy:
    if num_draft_tokens is not None:
        return FixedPolicy(num_draft_tokens, min_confidence=0.0, branches=False)
    measured = {rows: costs.target_s(rows) for rows in range(1, _MOST_DRAFT_TOKENS + 2)}
    draft_token_s = {"draft-model": costs.draft_s(1)}
    return AdaptivePolicy(RowCosts(measured), draft_token_s, branches=False, clock=clock)


def _decoded(decoder: Decoder, known: _Known) -> Stats:
    prompt, count = known.tokens[:_PROMPT_TOKENS], len(known.tokens) - _PROMPT_TOKENS
    decoder.target.prefill(prompt[:-1])
    stats = Stats(prompt_n=len(prompt))
    limits = GenerationLimits(count, frozenset(), _CONTEXT, _CAPABILITIES.max_rows)
    for _ in decoder.decode(prompt, Sampler(SamplingParams(), prompt), limits, stats.observe):
        pass
    return stats


class _Known(NamedTuple):
    """A text whose tokens mean nothing, and what the two models say before each of them: [tokens,
    VOCAB] logits."""

    tokens: list[int]
    written: np.ndarray
    drafted: np.ndarray


@lru_cache(maxsize=256)
def _known(text: DraftedText, seed: int) -> _Known:
    count = _PROMPT_TOKENS + len(text.ranks)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    written, drafted = np.zeros((2, count, VOCAB), np.float32)
    for place in range(_PROMPT_TOKENS, count):
        token, which = tokens[place], place - _PROMPT_TOKENS
        written[place, token] = _CERTAIN
        others = [(token + 1 + i) % VOCAB for i in range(VOCAB - 1)]
        rank, first = text.ranks[which], max(text.certainty[which], _LEAST_CERTAIN)
        ranking = [*others[:rank], token, *others[rank:]]
        second = min((1 - first) * _SECOND, first / 2)  # the first stays the first
        drafted[place] = np.log((1 - first - second) / (VOCAB - 2))
        drafted[place, ranking[:2]] = np.log([first, second])
    return _Known(tokens, written, drafted)


class VirtualModel:
    """Gives fixed scores at each place of a text, and has its passes take their time. says:
    logits before each token of the text, [tokens, vocab]."""

    capabilities = _CAPABILITIES

    def __init__(
        self, text: Sequence[int], says: np.ndarray, passes: Callable[[int], None]
    ) -> None:
        self.config = smallest_config("virtual", says.shape[1], _CONTEXT)
        self._text, self._says, self._passes = text, says, passes

    def open_session(self) -> Session:
        return VirtualSession(self._text, self._says, self._passes)

    def close(self) -> None: ...


class VirtualSession:
    """Chains only. Off the text all tokens are as likely as each other."""

    def __init__(
        self, text: Sequence[int], says: np.ndarray, passes: Callable[[int], None]
    ) -> None:
        self._text, self._says, self._passes = text, says, passes
        self._on_text = [True]  # after each number of committed tokens
        self._read: list[bool] = []  # the same after each row of the last pass

    @property
    def length(self) -> int:
        return len(self._on_text) - 1

    def prefill(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._on_text.append(self._follows(self._on_text[-1], self.length, token))

    def forward(self, tree: TokenTree) -> Forward:
        on_text, self._read = self._on_text[-1], []
        logits = np.zeros((len(tree), self._says.shape[1]), np.float32)
        for row, token in enumerate(tree.tokens.tolist()):
            on_text = self._follows(on_text, self.length + row, token)
            self._read.append(on_text)
            if on_text and self.length + row + 1 < len(self._says):
                logits[row] = self._says[self.length + row + 1]
        self._passes(len(tree))
        return Forward(logits)

    def commit(self, rows: Sequence[int]) -> None:
        self._on_text += [self._read[row] for row in rows]

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        del self._on_text[length + 1 :]

    def close(self) -> None: ...

    def _follows(self, on_text: bool, place: int, token: int) -> bool:
        return on_text and place < len(self._text) and self._text[place] == token
