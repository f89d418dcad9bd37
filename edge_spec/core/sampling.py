"""From logits to tokens: processing, probabilities and seeded draws."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple, Protocol

import numpy as np

from edge_spec.core.rng import Draws, Purpose, exponential, generator, pick
from edge_spec.core.sampling_params import LEAST_PENALTY as LEAST_PENALTY
from edge_spec.core.sampling_params import SamplingParams as SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError


class Constraint(Protocol):
    """Limits one answer's tokens, such as a grammar does. Used by one thread at a time."""

    def allowed(self, path: Sequence[int]) -> np.ndarray:
        """Return [vocab] bool: tokens allowed after the output and `path`; all if `path` is not
        allowed, since nothing after it is written."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Count how many of `tokens`, in sequence, may follow the output."""

    def forced(self) -> list[int]:
        """Return tokens that spell the required continuation, though others may spell it too."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""


def permitted(tree: TokenTree, constraint: Constraint) -> TokenTree:
    """Drop draft tokens that the constraint forbids, with their descendants.

    Sampled rows stay, because dropping one for its value would change the distribution; so do trees
    with required rows, from whose scores their drafter learns.
    """
    if len(tree) == 1 or tree.required or any(probs is not None for probs in tree.draft_probs):
        return tree
    if tree.is_chain:
        return tree.first_rows(1 + constraint.num_allowed(tree.tokens[1:].tolist()))
    kept = [0]
    for row in range(1, len(tree)):
        if int(tree.parents[row]) in kept:
            path = tree.tokens[tree.path(row)[1:]].tolist()
            if constraint.num_allowed(path) == len(path):
                kept.append(row)
    return tree.select(kept)


class Score(NamedTuple):
    """A token's probability before penalties and grammar."""

    logprob: float  # natural logarithm
    alternatives: tuple[tuple[int, float], ...]  # likeliest first


def score_of(logits: np.ndarray, token: int, num_alternatives: int) -> Score:
    """Score `token` given the model's logits, [vocab] float32."""
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    count = min(num_alternatives, len(logprobs))
    least = np.partition(logprobs, -count)[-count] if count else np.inf
    likeliest = np.flatnonzero(logprobs >= least)  # ascending; more than `count` if some tie
    likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")][:count]
    alternatives = tuple((int(each), float(logprobs[each])) for each in likeliest)
    return Score(float(logprobs[token]), alternatives)


class TokenChoice(NamedTuple):
    token: int
    near_tie: bool  # greedy: another token was within numeric noise


class Sampler:
    """Chooses one generation's tokens; owns the penalties' history and the random draws.

    Each position is a race won by the smallest E / probability, E being an exponential number for
    this token and position, which samples from the probabilities. Models with similar probabilities
    mostly choose the same token, so a draft in the same race drafts well without affecting the
    target's choices (Daliri et al. 2024, Coupling without Communication and Drafter-Invariant
    Speculative Decoding).

    `tie_margin`: logit margin within which a choice may depend on the number of rows scored
    together (Losslessness.tie_margin); 0 if none can. `sampled_drafts`: drafts may be sampled
    independently. More of them are accepted, but the text, though of the same distribution, is not
    that of plain decoding with the same numbers; allowed by default unless a seed asks for a
    reproducible text. `num_alternatives`: how many `score` lists; None: do not score.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        tie_margin: float = 0.0,
        sampled_drafts: bool | None = None,
        constraint: Constraint | None = None,
        num_alternatives: int | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.num_alternatives = num_alternatives
        self.tie_margin = tie_margin
        self._raw = params.raw and constraint is None
        self._greedy, self._penalized = params.greedy, params.penalized  # read for each row
        allowed = params.seed is None if sampled_drafts is None else sampled_drafts
        self.sampled_drafts = allowed and not params.greedy
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_chosen = 0
        self._draws = Draws(self.seed, Purpose.POSITION)
        self._streams: dict[Purpose, np.random.Generator] = {}
        self._prompt = frozenset(prompt) if params.penalized else frozenset()
        self._output: Counter[int] = Counter()

    def observe(self, tokens: Iterable[int]) -> None:
        if self.constraint is not None:
            tokens = list(tokens)
            self.constraint.observe(tokens)
        for token in tokens:
            self.num_chosen += 1
            if self._penalized:
                self._output[token] += 1

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> TokenChoice:
        """Return the token after the output and `path`, the row's own draft tokens. logits: [vocab]
        float32, not modified. Like `probs` and `preference`, raises SessionError if the largest
        logit is not finite (NaN counts; -inf: no token is allowed)."""
        if not self._raw:
            logits = self._processed(logits, path)
        if self._greedy:
            token = int(logits.argmax())  # index of a NaN, if any
            _require_number(logits[token])
            if not self.tie_margin:
                return TokenChoice(token, near_tie=False)
            close = np.count_nonzero(logits >= logits[token] - self.tie_margin)
            return TokenChoice(token, bool(close > 1))
        tokens, probabilities = _kept(logits, self.params)
        first = self._race(tokens, probabilities, len(path)).argmin()
        return TokenChoice(int(tokens[first]), near_tie=False)

    def probs(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        """Return [vocab] float64, the distribution of `choose`; one-hot if greedy."""
        if not self._raw:
            logits = self._processed(logits, path)
        if self._greedy:
            probabilities = np.zeros(len(logits))
            token = int(logits.argmax())
            _require_number(logits[token])
            probabilities[token] = 1
            return probabilities
        return target_probs(logits, self.params)

    @property
    def prefers_by_logits(self) -> bool:
        """Return whether `preference` is always exp of the given logits."""
        return self._raw and self._greedy

    def preference(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        """Return [vocab] weights, largest for `choose`'s token, that show how close others came:
        exp of logits if greedy, else inverse finish times."""
        if not self._raw:
            logits = self._processed(logits, path)
        if self._greedy:
            peak = logits.max()
            _require_number(peak)
            preference: np.ndarray = np.exp(logits - peak)
            return preference
        tokens, probabilities = _kept(logits, self.params)
        preference = np.zeros(len(logits))
        preference[tokens] = 1 / self._race(tokens, probabilities, len(path))
        return preference

    def score(self, logits: np.ndarray, token: int) -> Score | None:
        count = self.num_alternatives
        return None if count is None else score_of(logits, token, count)

    def uniform(self, purpose: Purpose) -> float:
        """Draw the next number of a stream, in [0, 1)."""
        if purpose not in self._streams:
            self._streams[purpose] = generator(self.seed, purpose)
        return self._streams[purpose].random()

    def draw(self, probabilities: np.ndarray, purpose: Purpose) -> int:
        """Draw a token from [vocab] weights, which need not sum to 1."""
        return pick(probabilities, self.uniform(purpose))

    def _race(self, tokens: np.ndarray, probabilities: np.ndarray, depth: int) -> np.ndarray:
        """Return [tokens] float64 finish times; infinity at probability 0."""
        finish = exponential(self._draws.at(self.num_chosen + depth), tokens)
        with np.errstate(divide="ignore", over="ignore"):  # probability near or equal to 0
            finish /= probabilities
        return finish

    def _processed(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        params = self.params
        logits = logits.copy()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if self._penalized:
            output = self._output.copy()
            output.update(path)
            seen = np.fromiter(output.keys() | self._prompt, np.int64)
            # Keskar et al. 2019 (CTRL), section 4.1: divide where positive, multiply elsewhere.
            logits[seen] = np.where(
                logits[seen] > 0,
                logits[seen] / params.repetition_penalty,
                logits[seen] * params.repetition_penalty,
            )
            written = np.fromiter(output, np.int64)
            logits[written] -= params.presence_penalty
            if params.frequency_penalty:
                times = np.fromiter(output.values(), np.float32)
                logits[written] -= np.float32(params.frequency_penalty) * times
        if self.constraint is not None:
            logits[~self.constraint.allowed(path)] = -np.inf
        return logits


def target_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return [vocab] float64 probabilities after temperature, top-k, top-p and min-p. top-k and
    top-p keep all ties with the last token kept, so the order of equal logits does not matter."""
    tokens, kept = _kept(logits, params)
    if len(kept) == len(logits):
        return kept
    probabilities = np.zeros(len(logits))
    probabilities[tokens] = kept
    return probabilities


def _kept(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept tokens, ascending, and their float64 probabilities."""
    tokens = np.arange(len(logits))
    peak = logits.max()
    _require_number(peak)
    if 0 < params.top_k < len(logits):
        tokens = np.flatnonzero(logits >= np.partition(logits, -params.top_k)[-params.top_k])
        logits = logits[tokens]
    probabilities = logits.astype(np.float64)
    probabilities -= peak
    with np.errstate(over="ignore"):  # a temperature next to 0
        probabilities /= params.temperature
    np.exp(probabilities, out=probabilities)
    probabilities /= probabilities.sum()
    least = params.min_p * float(probabilities.max()) if params.min_p > 0 else 0.0
    if params.top_p < 1:
        least = max(least, _least_of_nucleus(probabilities, params.top_p))
    if least > 0:
        above = np.flatnonzero(probabilities >= least)
        tokens, probabilities = tokens[above], probabilities[above]
        probabilities /= probabilities.sum()
    return tokens, probabilities


def _require_number(peak: float) -> None:
    """Raise SessionError unless `peak`, the largest logit (NaN if any is), is finite."""
    if not isfinite(peak):
        raise SessionError(
            f"the model's scores are no numbers (the largest is {peak})",
            remedy="Export the model again, or choose another --device or --runtime.",
        )


def _least_of_nucleus(probabilities: np.ndarray, top_p: float) -> float:
    """Return the smallest of the largest probabilities that sum to `top_p`."""
    # Probabilities below this sum to less than half of 1 - top_p.
    negligible = (1 - top_p) / (2 * len(probabilities))
    smallest, mass = float(probabilities.max()), 0.0
    while mass <= top_p and smallest > negligible:  # so that few need sorting
        smallest = max(smallest / 256, negligible)
        large = probabilities[probabilities >= smallest]
        mass = float(large.sum())
    descending = np.sort(large)[::-1]
    last = int(descending.cumsum().searchsorted(top_p * (1 - 1e-12)))
    return float(descending[min(last, len(descending) - 1)])
