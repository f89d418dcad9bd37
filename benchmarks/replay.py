"""Recorded texts, decoded again by any drafters and policy at the row costs of any machine.

What a drafter drafts and what is accepted of it depends on the text alone, and the greedy text on
nothing but the model. So one recording tells what speculation would gain with other drafters, under
another policy, or on a machine whose t(k) is known: the real round loop runs on a session that
answers from the recording and on a clock that the costs advance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Forward, Session, require_rollback
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup.recycling import TOP_TOKENS, top_tokens
from edge_spec.drafters.protocol import GREEDY, Budget, Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.scheduler.policy import Policy

MAX_ROWS = 64
UNLIKELY = -1e4  # logit of what is not among the recorded tokens

PassCost = Callable[[int, int], float]  # rows, tokens of context -> seconds


@dataclass(frozen=True, eq=False)
class Recording:
    """One greedy text with what its model thought likely on the way."""

    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # that were recorded; perhaps with the stop token
    top: np.ndarray  # [tokens, TOP_TOKENS] int32; row i: the likeliest after tokens[:i], best first
    gaps: np.ndarray  # [tokens, TOP_TOKENS] float32; how far each one's logit is below the best


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class DraftCost(NamedTuple):
    """Seconds that a drafter takes of one round."""

    propose_s: float = 0.0
    a_row_s: float = 0.0  # of it, more for each draft token
    observe_s: float = 0.0


Speculate = Callable[[VirtualClock], tuple[Sequence[Drafter], Policy]]


def record(
    session: Session,
    prompt: Sequence[int],
    num_tokens: int,
    stop_ids: Collection[int],
    category: str = "",
) -> Recording:
    """Decodes plainly and greedily, from an empty cache. Raises ContextFullError."""
    session.rollback(0)
    session.prefill(prompt[:-1])
    pending = prompt[-1]
    tokens: list[int] = []
    top, gaps = [], []
    while len(tokens) < num_tokens and pending not in stop_ids:
        logits = session.forward(TokenTree.chain(pending)).logits
        best = top_tokens(logits, min(TOP_TOKENS, logits.shape[1]))[0]
        values = logits[0, best]
        session.commit([0])
        pending = int(logits[0].argmax())
        tokens.append(pending)
        top.append(best)
        gaps.append(values[0] - values)
    return Recording(
        category,
        tuple(prompt),
        tuple(tokens),
        np.array(top, np.int32),
        np.array(gaps, np.float32),
    )


def replay(
    recordings: Sequence[Recording],
    vocab_size: int,
    speculate: Speculate,
    pass_s: PassCost,
) -> list[Stats]:
    """Returns statistics of each recording, with times of a clock on which a pass takes `pass_s`.

    speculate: makes the drafters and the policy, once for all recordings, as in one session.
    Drafters take no time on that clock unless they advance it, as `Charged` does.
    """
    clock = VirtualClock()
    drafters, policy = speculate(clock)
    logits = np.full((MAX_ROWS, vocab_size), UNLIKELY, np.float32)
    all_stats = []
    for recording in recordings:
        session = RecordedSession(recording, logits, pass_s, clock)
        session.prefill(recording.prompt[:-1])
        stats = Stats(prompt_n=len(recording.prompt))
        decoder = Decoder(session, drafters, policy, clock=clock)
        context = len(recording.prompt) + len(recording.tokens) + MAX_ROWS
        limits = GenerationLimits(len(recording.tokens), frozenset(), context, MAX_ROWS)
        for _ in decoder.decode(
            recording.prompt, Sampler(SamplingParams(), recording.prompt), limits, stats.observe
        ):
            pass
        session.close()
        all_stats.append(stats)
    return all_stats


class RecordedSession:
    """Answers with the recorded logits; off the text, with what followed the same token there.

    logits: [MAX_ROWS, vocab], all UNLIKELY; shared by sessions that are used in turns.
    """

    def __init__(
        self, recording: Recording, logits: np.ndarray, pass_s: PassCost, clock: VirtualClock
    ) -> None:
        self.length = 0
        self._recording = recording
        self._text = (*recording.prompt, *recording.tokens)
        self._after = {  # what a token was followed by
            token: i for i, token in enumerate((recording.prompt[-1], *recording.tokens[:-1]))
        }
        self._logits = logits
        self._written: list[tuple[int, np.ndarray]] = []
        self._pass_s = pass_s
        self._clock = clock

    def prefill(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def forward(self, tree: TokenTree) -> Forward:
        self._wipe()
        recording = self._recording
        start = self.length + 1 - len(recording.prompt)  # of the token after row 0
        on_text = [True]
        for row, (token, parent) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        ):
            depth = int(tree.depths[row])
            place = self.length + depth
            if row:
                on_text.append(
                    on_text[parent] and place < len(self._text) and self._text[place] == token
                )
            which = start + depth if on_text[row] else self._after.get(token)
            if which is not None and which < len(recording.tokens):
                self._write(row, which)
        self._clock.advance(self._pass_s(len(tree), self.length))
        return Forward(self._logits[: len(tree)])

    def commit(self, rows: Sequence[int]) -> None:
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length = length

    def close(self) -> None:
        self._wipe()

    def _write(self, row: int, which: int) -> None:
        best = self._recording.top[which]
        self._logits[row, best] = -self._recording.gaps[which]
        self._written.append((row, best))
        # Of equal logits the text's own token has to be the first.
        self._logits[row, self._recording.tokens[which]] = 1e-3

    def _wipe(self) -> None:
        for row, best in self._written:
            self._logits[row, best] = UNLIKELY
        self._written.clear()


class Charged(Drafter):
    """Another drafter, whose work takes a given time: the same on every machine."""

    def __init__(self, drafter: Drafter, cost: DraftCost, clock: VirtualClock) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._cost = cost
        self._clock = clock

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._drafter.begin(prompt, sampler)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        tree = self._drafter.propose(pending, budget)
        self._clock.advance(self._cost.propose_s + self._cost.a_row_s * (len(tree) - 1))
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._drafter.observe(tree, out, verdict)
        self._clock.advance(self._cost.observe_s)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._drafter.skip(tree, out, verdict)
