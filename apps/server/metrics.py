"""Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edge_spec import GenerationResult
from edge_spec.apps.server.answer import ServedModel

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Use it only in the event loop. With several models, their names are labels."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.paths: Sequence[str] = ()  # those with a label of their own; the others share one
        self._registry = CollectorRegistry()
        self._model_label = ["model"] if len(models) > 1 else []
        self._requests = Counter(
            "edge_spec_requests",
            "Answered requests.",
            ["path", "status"],
            registry=self._registry,
        )
        for name, help, value in _NOW if len(models) > 1 else _NOW[:-1]:
            gauge = self._make(Gauge, name, help)
            for model in models:
                self._of(gauge, model.name).set_function(partial(value, model))
        make = self._make
        self._prompt = make(Counter, "prompt_tokens", "Tokens of prompts.", ["source"])
        self._predicted = make(Counter, "predicted_tokens", "Tokens that were written.")
        self._draft = make(Counter, "draft_tokens", "Draft tokens verified.")
        self._accepted = make(Counter, "draft_accepted_tokens", "Draft tokens accepted.")
        self._rounds = make(Counter, "rounds", "Rounds: speculative, or why not.", ["kind"])
        told = "From the request to its first token, the wait for a slot included."
        self._wait_s = make(Histogram, "time_to_first_token_seconds", told, buckets=_WAITS_S)
        told = "Of an answer, on average."
        self._token_s = make(Histogram, "time_per_token_seconds", told, buckets=_TOKENS_S)
        told = "Of the last answer, over plain rounds of its slot; NaN until it is known."
        self._speedup = make(Gauge, "speedup", told)
        for model in models:
            self._of(self._speedup, model.name).set(float("nan"))

    def observe_request(self, path: str, status: int) -> None:
        self._requests.labels(path if path in self.paths else "other", str(status)).inc()

    def observe_answer(
        self, model: str, results: Sequence[GenerationResult], first_token_s: float | None
    ) -> None:
        if first_token_s is not None:
            self._of(self._wait_s, model).observe(first_token_s)
        for stats in (result.stats for result in results):
            self._of(self._prompt, model, "cache").inc(stats.cached_n)
            self._of(self._prompt, model, "scored").inc(stats.prompt_n - stats.cached_n)
            self._of(self._predicted, model).inc(stats.predicted_n)
            self._of(self._draft, model).inc(stats.draft_n)
            self._of(self._accepted, model).inc(stats.draft_n_accepted)
            speculative = stats.rounds - stats.plain_rounds
            self._of(self._rounds, model, "speculative").inc(speculative)
            for reason, count in stats.plain_reasons.items():
                self._of(self._rounds, model, reason).inc(count)
            if stats.predicted_n:
                token_s = stats.predicted_ms / 1e3 / stats.predicted_n
                self._of(self._token_s, model).observe(token_s)
            if stats.speedup is not None:
                self._of(self._speedup, model).set(stats.speedup)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _make(
        self, kind: Any, name: str, help: str, labels: Sequence[str] = (), **settings: Any
    ) -> Any:
        labels = [*labels, *self._model_label]
        return kind(f"edge_spec_{name}", help, labels, registry=self._registry, **settings)

    def _of(self, metric: Any, model: str, *labels: str) -> Any:
        labels = (*labels, model) if self._model_label else labels
        return metric.labels(*labels) if labels else metric


_NOW: Sequence[tuple[str, str, Callable[[ServedModel], float]]] = (
    (
        "queue_length",
        "Requests that wait.",
        lambda model: model.num_waiting + (model.opened.pool.num_waiting if model.opened else 0),
    ),
    (
        "slots_busy",
        "Slots that answer.",
        lambda model: model.opened.pool.num_busy if model.opened else 0,
    ),
    (
        "slots",
        "Slots that there are.",
        lambda model: len(model.opened.pool.slots) if model.opened else 0,
    ),
    ("model_loaded", "1 where the model is open.", lambda model: model.opened is not None),
)
