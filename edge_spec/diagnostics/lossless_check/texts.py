"""Texts with speculation against plain ones, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.rng import Draws, Purpose, exponential
from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.bench.measuring import Task
from edge_spec.engine.engine import Engine
from edge_spec.engine.results import GenerationResult

# In logits. Rounding made 0.75 at most on the runtimes that we know (docs/lossless.md); passes that
# are wrong by themselves measure as much noise as they need for an excuse.
MOST_NOISE = 1.0
_FORCED = 1e6  # added to a token's logit: it is what is written


@dataclass(frozen=True)
class Difference:
    """The first token at which a text left the plain one.

    margin: by how much the plain choice won there, in logits; None where one text only ended.
    near_tie: within the noise, and within MOST_NOISE. exact_removes: None where that was not tried.
    """

    prompt: str
    token_index: int
    expected: str
    got: str
    margin: float | None
    near_tie: bool
    exact_removes: bool | None = None


@dataclass(frozen=True)
class Texts:
    """near_ties: greedy choices within the noise; most come out as in the plain text."""

    num_prompts: int
    num_tokens: int
    num_guesses: int
    num_accepted: int
    near_ties: int
    differing: tuple[Difference, ...]

    def __add__(self, other: Texts) -> Texts:
        return Texts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def passed(self) -> bool | None:
        """Returns None without draft tokens, which shows nothing."""
        equal = all(difference.near_tie for difference in self.differing)
        return equal if self.num_guesses or not equal else None


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
        with self.engine.verifying_all_draft_tokens():
            always_verify = self.texts(what, tasks[::2], progress)
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
            near_ties=sum(result.stats.near_ties for result in results),
            differing=tuple(differing),
        )

    def repeated(self, task: Task, num_runs: int, progress: Progress) -> list[Difference]:
        """Returns the difference of each further run of one request from the first."""
        differing, first = [], ids(self._answer(task))
        for i in range(1, num_runs):
            progress("Repeating a request", i / num_runs)
            differing += self._difference(task, first, ids(self._answer(task)))
        return differing

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
