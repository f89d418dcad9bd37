"""Every statistic of a generation, defined once, under the field's names."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import add
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

_MIN_PLAIN_ROUNDS = 3


class PlainReason(StrEnum):
    """Why a round was not speculative."""

    OFF = "off"
    NO_CANDIDATE = "no_candidate"
    BELOW_BREAK_EVEN = "below_break_even"
    COOLDOWN = "cooldown"
    UNSUPPORTED = "unsupported"
    SHARED = "shared"  # other conversations' rows fill the shared pass, or gain more
    DRAFT_FAILED = "draft_failed"  # all drafters failed, and rest for this answer
    DRAFT_FULL = "draft_full"  # the text is longer than the draft's context
    BUDGET = "budget"  # no token or cache position left for drafts
    BASELINE = "baseline"  # to measure a plain step
    REPLAY = "replay"  # a plain step decides a near tie of a wider pass


class NoOverlap(StrEnum):
    """Why a draft model did not draft while the target verified."""

    OFF = "off"
    SAME_DEVICE = "same_device"  # both models run on it
    EXACT = "exact"  # plain steps decide near ties
    SLOWER = "slower"
    COMPARISON = "comparison"  # to measure it


class DraftCounts(NamedTuple):
    """Draft tokens of one drafter. A token that several drafters made counts for each."""

    draft_n: int
    draft_n_accepted: int


class RoundStats(NamedTuple):
    """One round: propose, forward, verify, commit. Times are in seconds."""

    num_rows: int  # of the tree; the pass itself may be padded
    num_draft_tokens: int
    num_accepted: int
    num_tokens: int  # committed: accepted ones, and the recovered, bonus or plain one
    plain_reason: PlainReason | None
    near_ties: int
    draft_s: float  # propose and observe
    forward_s: float
    total_s: float
    by_drafter: Mapping[str, DraftCounts] = MappingProxyType({})
    tokens: tuple[int, ...] = ()  # committed ones
    anticipated: bool = False  # drafted while the target verified the round before
    overlapped: bool = False  # a draft ran during verification
    no_overlap: NoOverlap | None = None  # why none ran, where one could have
    charged_s: float | None = None  # of a shared pass: its rows' part
    num_sharing: int = 1  # conversations in that pass
    accepted_by: tuple[str, ...] = ()  # for each accepted token: its drafters, joined by "+"

    def first_tokens(self, count: int) -> RoundStats:
        """Return the round as if the text had ended after `count` tokens, as by a stop string;
        later draft tokens count as verified, not accepted."""
        if count >= self.num_tokens:
            return self
        lost = Counter(name for names in self.accepted_by[count:] for name in names.split("+"))
        return self._replace(
            num_tokens=count,
            num_accepted=min(count, self.num_accepted),
            by_drafter={
                name: DraftCounts(counts.draft_n, counts.draft_n_accepted - lost[name])
                for name, counts in self.by_drafter.items()
            },
            tokens=self.tokens[:count],
            accepted_by=self.accepted_by[:count],
        )

    def as_charged(self) -> RoundStats:
        """Return the round as if its charged part were the whole pass. One more row slows all
        conversations in a shared pass, so it pays only at their common rate."""
        if self.charged_s is None or self.forward_s <= 0:
            return self
        # Threads also wait for each other outside passes, in the same proportion.
        around_s = (self.total_s - self.forward_s - self.draft_s) * self.charged_s / self.forward_s
        total_s = self.draft_s + self.charged_s + around_s
        return self._replace(forward_s=self.charged_s, total_s=total_s)


class PlainRate:
    """Durations of a session's recent plain rounds: the baseline of every speedup. plain_width:
    rows in a plain step's pass, which draft tokens may fill."""

    def __init__(self, plain_width: int = 1) -> None:
        self._plain_width = plain_width
        self._seconds: deque[float] = deque(maxlen=256)

    def observe(self, round_stats: RoundStats) -> None:
        if round_stats.num_rows <= self._plain_width:
            self._seconds.append(round_stats.total_s - round_stats.draft_s)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._seconds)

    def restore(self, seconds: Iterable[float]) -> None:
        self._seconds.clear()
        self._seconds.extend(seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Return None before a few plain rounds were measured."""
        if len(self._seconds) < _MIN_PLAIN_ROUNDS:
            return None
        seconds = median(self._seconds)
        return 1 / seconds if seconds else None  # a coarse clock may see no time pass


@dataclass
class Stats:
    """Sums over the rounds of one generation.

    Statistics of the text are the same without drafting: `predicted_n` counts its tokens, including
    an end token; `stop_n` counts those that spelled a stop string or followed it, which plain
    decoding generates as well.

    `lossless` names the guarantee for the text. `plain_width` is the number of rows in a plain
    step's pass, `plain_cost` the duration of a plain step relative to the fastest one, of one row.

    `acceptance_rate` is accepted / verified rows (`RoundStats.first_tokens`).
    `mean_accepted_length` is tokens a round, including the recovered or bonus token. `speedup` is
    the measured rate over that of plain rounds in the same session, None where these were too few.
    Both include `stop_n`: plain decoding spends a round on each.
    """

    prompt_n: int = 0
    cached_n: int = 0  # of prompt_n, tokens still in the KV cache
    prompt_ms: float = 0.0
    ttft_ms: float = 0.0
    predicted_n: int = 0
    stop_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0
    plain_reasons: Counter[str] = field(default_factory=Counter)
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    near_ties: int = 0
    anticipated_n: int = 0  # speculative rounds that began with finished drafts
    overlapped_n: int = 0  # speculative rounds with a draft during verification
    # of other rounds: why the draft waited
    overlap_reasons: Counter[str] = field(default_factory=Counter)
    plain_per_second: float | None = None
    lossless: str = ""
    plain_width: int = 1
    plain_cost: float = 1.0
    failed_drafters: tuple[str, ...] = ()  # not used, or not to the end
    policy: str = ""  # in use at the end: one line
    kernels: str | None = None  # edge-spec's own, or why not: one line

    def observe(self, round_stats: RoundStats) -> None:
        self.rounds += 1
        self.predicted_n += round_stats.num_tokens
        self.predicted_ms += round_stats.total_s * 1e3
        self.draft_n += round_stats.num_draft_tokens
        self.draft_n_accepted += round_stats.num_accepted
        self.draft_ms += round_stats.draft_s * 1e3
        self.verify_ms += round_stats.forward_s * 1e3
        self.near_ties += round_stats.near_ties
        for name, counts in round_stats.by_drafter.items():
            before = self.drafters.get(name, DraftCounts(0, 0))
            self.drafters[name] = DraftCounts(*map(add, before, counts))
        if round_stats.plain_reason is not None:
            self.plain_rounds += 1
            self.plain_reasons[round_stats.plain_reason.value] += 1
        else:
            self.acceptance_histogram[round_stats.num_accepted] += 1
            self.anticipated_n += round_stats.anticipated
            self.overlapped_n += round_stats.overlapped
            if round_stats.no_overlap is not None:
                self.overlap_reasons[round_stats.no_overlap.value] += 1

    @property
    def predicted_per_second(self) -> float:
        return self.predicted_n / self.predicted_ms * 1e3 if self.predicted_ms else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.draft_n_accepted / self.draft_n if self.draft_n else None

    @property
    def mean_accepted_length(self) -> float | None:
        return (self.predicted_n + self.stop_n) / self.rounds if self.rounds else None

    @property
    def overhead_ms(self) -> float:
        """Time outside drafting and the target's passes."""
        return self.predicted_ms - self.draft_ms - self.verify_ms

    @property
    def speedup(self) -> float | None:
        written_n = self.predicted_n + self.stop_n
        if self.plain_per_second is None or not written_n or not self.predicted_ms:
            return None
        return written_n / self.predicted_ms * 1e3 / self.plain_per_second

    @property
    def fastest_plain_per_second(self) -> float | None:
        return self.plain_per_second and self.plain_per_second * self.plain_cost

    @property
    def speedup_over_fastest_plain(self) -> float | None:
        speedup = self.speedup
        return speedup and speedup / self.plain_cost

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _TOLD}
        values |= {name: round(values[name], 3) for name in _ROUNDED}
        histogram = sorted(self.acceptance_histogram.items())
        return values | {
            "acceptance_histogram": {str(n): count for n, count in histogram},
            "drafters": {name: counts._asdict() for name, counts in self.drafters.items()},
            "plain_reasons": dict(self.plain_reasons),
            "overlap_reasons": dict(self.overlap_reasons),
            "failed_drafters": list(self.failed_drafters),
        }


_TIMES = ("prompt_ms", "ttft_ms", "predicted_ms", "draft_ms", "verify_ms", "overhead_ms")
_ROUNDED = (*_TIMES, "predicted_per_second")  # to microseconds
# In the order of `to_dict`.
_TOLD = (
    *("prompt_n", "cached_n", "prompt_ms", "ttft_ms", "predicted_n", "predicted_ms"),
    *("predicted_per_second", "draft_n", "draft_n_accepted", "acceptance_rate"),
    *("mean_accepted_length", "acceptance_histogram", "drafters"),
    *("rounds", "plain_rounds", "plain_reasons", "draft_ms", "verify_ms", "overhead_ms"),
    *("near_ties", "anticipated_n", "overlapped_n", "overlap_reasons"),
    *("plain_per_second", "speedup", "lossless", "plain_width", "fastest_plain_per_second"),
    *("speedup_over_fastest_plain", "failed_drafters"),
    *("policy", "kernels"),
)
