"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edge_spec import GenerationResult
from edge_spec.apps.server.slots import Pool

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Used in the event loop alone."""

    def __init__(self, pool: Pool, paths: Sequence[str]) -> None:
        """paths: that requests are counted by; all others count as one."""
        registry = CollectorRegistry()
        self._registry = registry
        self._paths = frozenset(paths)
        self._requests = Counter(
            "edge_spec_requests", "Answered requests.", ["path", "status"], registry=registry
        )
        waiting = Gauge("edge_spec_queue_length", "Requests that wait.", registry=registry)
        waiting.set_function(lambda: pool.num_waiting)
        busy = Gauge("edge_spec_slots_busy", "Slots that answer.", registry=registry)
        busy.set_function(lambda: pool.num_busy)
        slots = Gauge("edge_spec_slots", "Slots that there are.", registry=registry)
        slots.set(len(pool.slots))
        self._prompt = Counter(
            "edge_spec_prompt_tokens", "Tokens of prompts.", ["source"], registry=registry
        )
        self._predicted = Counter(
            "edge_spec_predicted_tokens", "Tokens that were written.", registry=registry
        )
        self._draft = Counter("edge_spec_draft_tokens", "Draft tokens verified.", registry=registry)
        self._accepted = Counter(
            "edge_spec_draft_accepted_tokens", "Draft tokens accepted.", registry=registry
        )
        self._rounds = Counter(
            "edge_spec_rounds", "Rounds: speculative, or why not.", ["kind"], registry=registry
        )
        self._wait_s = Histogram(
            "edge_spec_time_to_first_token_seconds",
            "From the request to its first token, the wait for a slot included.",
            buckets=_WAITS_S,
            registry=registry,
        )
        self._token_s = Histogram(
            "edge_spec_time_per_token_seconds",
            "Of an answer, on average.",
            buckets=_TOKENS_S,
            registry=registry,
        )
        self._speedup = Gauge(
            "edge_spec_speedup",
            "Of the last answer, over plain rounds of its slot; NaN until it is known.",
            registry=registry,
        )
        self._speedup.set(float("nan"))

    def observe_request(self, path: str, status: int) -> None:
        self._requests.labels(path if path in self._paths else "other", str(status)).inc()

    def observe_answer(
        self, results: Sequence[GenerationResult], first_token_s: float | None
    ) -> None:
        if first_token_s is not None:
            self._wait_s.observe(first_token_s)
        for stats in (result.stats for result in results):
            self._prompt.labels("cache").inc(stats.cached_n)
            self._prompt.labels("scored").inc(stats.prompt_n - stats.cached_n)
            self._predicted.inc(stats.predicted_n)
            self._draft.inc(stats.draft_n)
            self._accepted.inc(stats.draft_n_accepted)
            self._rounds.labels("speculative").inc(stats.rounds - stats.plain_rounds)
            for reason, count in stats.plain_reasons.items():
                self._rounds.labels(reason).inc(count)
            if stats.predicted_n:
                self._token_s.observe(stats.predicted_ms / 1e3 / stats.predicted_n)
            if stats.speedup is not None:
                self._speedup.set(stats.speedup)

    def text(self) -> bytes:
        return generate_latest(self._registry)
