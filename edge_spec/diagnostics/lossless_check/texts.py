"""Texts with speculation against plain ones, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import log

import numpy as np

from edge_spec.control.policy import AlwaysVerifyPolicy
from edge_spec.core.model import Progress
from edge_spec.core.rng import Draws, Purpose, exponential
from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.bench.measuring import Task
from edge_spec.engine.engine import Engine
from edge_spec.engine.results import GenerationResult, Origin

# In logits. Rounding made 0.75 at most on the runtimes that we know (docs/lossless.md); passes that
# are wrong by themselves measure as much noise as they need for an excuse.
MOST_NOISE = 1.0
_FORCED = 1e6  # added to a token's logit: it is what is written
_LEAST_EVENTS = 5  # accepted draft tokens, and rejected ones: fewer show nothing


@dataclass(frozen=True)
class Difference:
    """The first token at which a text left the plain one.

    margin: by how much the plain choice won there, in logits; None where one text only ended.
    near_tie: within the noise, and within MOST_NOISE.
    """

    prompt: str
    token_index: int
    expected: str
    got: str
    margin: float | None
    near_tie: bool


def missing_events(num_accepted: int, num_rejected: int, least: int) -> str:
    """Say which of the two was not exercised `least` times; "" where both were."""
    counts = {"accepted": num_accepted, "rejected": num_rejected}
    return " and ".join(
        f"{count} of at least {least} draft tokens were {what}"
        for what, count in counts.items()
        if count < least
    )


@dataclass(frozen=True)
class Texts:
    """near_ties: greedy choices within the noise; most come out as in the plain text.
    num_recovered: tokens that the target wrote in the place of wrong ones. num_branching: rounds
    whose draft tokens branched, of those that verified all draft tokens."""

    num_prompts: int
    num_tokens: int
    num_guesses: int
    num_accepted: int
    num_recovered: int
    num_branching: int
    near_ties: int
    differing: tuple[Difference, ...]

    def __add__(self, other: Texts) -> Texts:
        return Texts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def passed(self) -> bool | None:
        """Returns None where too little happened to show anything."""
        equal = all(difference.near_tie for difference in self.differing)
        return None if equal and self.missing else equal

    @property
    def num_rejected(self) -> int:
        """Count rejections. Of two branches one is rejected, whatever the target writes."""
        return self.num_recovered + self.num_branching

    @property
    def missing(self) -> str:
        """Say what was not exercised often enough; "" where all was."""
        return missing_events(self.num_accepted, self.num_rejected, _LEAST_EVENTS)


@dataclass(frozen=True)
class TextComparison:
    """params: greedy, or a temperature and a seed, and nothing else. noise: the change of a
    margin, in logits, that the width of a pass may make."""

    engine: Engine
    params: SamplingParams
    max_tokens: int
    noise: float

    def half_eager(self, what: str, tasks: Sequence[Task], progress: Progress) -> Texts:
        """Verifies all draft tokens of every other task from the first on; the others are
        answered as the engine is set up, which may leave out what does not pay."""
        with self.engine.verifying_all_draft_tokens() as exercised:
            always_verify = self.texts(what, tasks[::2], progress)
        num_branching = exercised[AlwaysVerifyPolicy.BRANCHES]
        always_verify = replace(always_verify, num_branching=num_branching)
        return always_verify + self.texts(f"{what}, as set up", tasks[1::2], progress)

    def texts(self, what: str, tasks: Sequence[Task], progress: Progress) -> Texts:
        """Each prompt's answer against the plain one, which is written right before it."""
        results, num_tokens, differing = [], 0, []
        for i, task in enumerate(tasks):
            progress(what, i / len(tasks))
            with self.engine.without_drafting():
                expected = ids(self._answer(task))
            num_tokens += len(expected)
            results.append(self._answer(task))
            differing += self._difference(task, expected, ids(results[-1]))
        return Texts(
            num_prompts=len(tasks),
            num_tokens=num_tokens,
            num_guesses=sum(result.stats.draft_n for result in results),
            num_accepted=sum(result.stats.draft_n_accepted for result in results),
            num_recovered=sum(
                token.origin is Origin.RECOVERED for result in results for token in result.tokens
            ),
            num_branching=0,
            near_ties=sum(result.stats.near_ties for result in results),
            differing=tuple(differing),
        )

    def repeated(
        self, task: Task, num_runs: int, progress: Progress
    ) -> tuple[int, list[Difference]]:
        """Returns the draft tokens that all runs of one request verified, and the difference of
        each further run from the first. All draft tokens are verified, whether or not that pays."""
        with self.engine.verifying_all_draft_tokens():
            first = self._answer(task)
            num_guesses, differing = first.stats.draft_n, []
            for i in range(1, num_runs):
                progress("Repeating a request", i / num_runs)
                again = self._answer(task)
                num_guesses += again.stats.draft_n
                differing += self._difference(task, ids(first), ids(again))
        return num_guesses, differing

    def _answer(self, task: Task) -> GenerationResult:
        return self.engine.generate(task.tokens, max_tokens=self.max_tokens, sampling=self.params)

    def _difference(
        self, task: Task, expected: Sequence[int], got: Sequence[int]
    ) -> list[Difference]:
        """Returns the difference of two texts, or nothing."""
        if expected == got:
            return []
        shared = min(len(expected), len(got))
        at = next((i for i in range(shared) if expected[i] != got[i]), shared)
        margin = None
        if at < shared:
            margin = self._margin([*task.tokens, *expected[:at]], at, expected[at], got[at])
        return [
            Difference(
                prompt=task.prompt.id,
                token_index=at,
                expected=self._text(expected[at : at + 1]),
                got=self._text(got[at : at + 1]),
                margin=margin,
                near_tie=margin is not None and margin <= min(self.noise, MOST_NOISE),
            )
        ]

    def _margin(self, before: Sequence[int], position: int, won: int, lost: int) -> float:
        """Returns the margin in logits, which log probabilities differ by too. In the race of a
        seeded choice (sampling.py) the largest log(probability) / temperature - log(E) wins."""
        scores = [self._log_probability(before, token) for token in (won, lost)]
        if self.params.seed is not None:
            key = Draws(self.params.seed, Purpose.POSITION).at(position)
            for i, number in enumerate(exponential(key, np.array([won, lost]))):
                scores[i] -= self.params.temperature * log(number)
        return abs(scores[0] - scores[1])

    def _log_probability(self, before: Sequence[int], token: int) -> float:
        """Scores the token as plain decoding does."""
        forced = SamplingParams(logit_bias={token: _FORCED})
        with self.engine.without_drafting():
            result = self.engine.generate(before, max_tokens=1, sampling=forced, logprobs=0)
        logprob = result.tokens[0].logprob
        assert logprob is not None  # it was asked for
        return logprob

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self.engine.parts.text.tokenizer
        return tokenizer.decode(tokens) or "".join(map(tokenizer.token_text, tokens))  # special


def ids(result: GenerationResult) -> list[int]:
    return [token.id for token in result.tokens]
