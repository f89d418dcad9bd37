"""Find the part of a model that drafts best for the whole: early exits and sets of skipped
sublayers, judged by agreement on a text and by cost."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import median

import numpy as np
from pydantic import TypeAdapter, ValidationError

from edge_spec.core.model import Model, SelfDrafting, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError, UnsupportedModelError
from edge_spec.models.bundle import PARTS_FILE, Bundle, add_file
from edge_spec.scheduler.cost import RowCosts, forecast_speedup

_WINDOW = 48  # last tokens of a text, on which parts are judged
_CONTEXT = 64  # before the window, read by the whole model only
_EXITS = (1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 5 / 6)  # of the layers
_SKIPPED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the sublayers
_NO_INFLUENCE = 1e-6
_TIMED = 5  # passes
_LONGEST = 8  # draft tokens of a round in forecasts
_FORECAST = attrgetter("forecast")


@dataclass(frozen=True)
class ChosenPart:
    """A part of a model that drafts. exit: first layers kept; None: all but `skipped` sublayers.
    agreement: share of tokens on which part and whole agree, None if not measured. cost: of a
    part's token relative to the whole model's. forecast: speedup of the best chain."""

    exit: int | None
    skipped: tuple[int, ...] = ()
    agreement: float | None = None
    cost: float = 1.0
    forecast: float = math.inf

    def __str__(self) -> str:
        left_out = f"{len(self.skipped)} sublayers left out"
        kept = left_out if self.exit is None else f"exit at layer {self.exit}"
        if self.agreement is None:
            return f"{kept}, as asked for"
        result = f"forecast {self.forecast:.2f} times plain decoding"
        verdict = result if self.forecast > 1 else f"{result}: this model gains nothing"
        return (
            f"{kept}, agrees on {self.agreement:.0%} of tokens at {self.cost:.0%} of the cost; "
            f"{verdict}"
        )

    def open(self, session: SelfDrafting) -> Session:
        if self.exit is not None:
            return session.open_exit(self.exit)
        return session.open_skipping(frozenset(self.skipped))


class Judge:
    """Scores ends of texts with the whole model once, then with parts. A context manager with two
    sessions a text. costs: of the whole model's rows. Raises UnsupportedModelError if sessions
    cannot run in part."""

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], costs: RowCosts) -> None:
        self._costs = costs
        self.num_layers = model.config.num_layers
        with ExitStack() as opened:
            self._windows = [_Window(model, text, opened) for text in texts]
            everything = frozenset(range(2 * self.num_layers))
            # What surrounds the layers, above all the head, is in every part.
            self._around_s = self._windows[0].step_s(everything)
            self._layers_s = max(0.0, self._windows[0].step_s(frozenset()) - self._around_s)
            self._opened = opened.pop_all()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def influence(self) -> np.ndarray:
        """Return [2 * layers], means over the texts."""
        influence: np.ndarray = np.mean([window.influence() for window in self._windows], axis=0)
        return influence

    def exit(self, num_layers: int) -> ChosenPart:
        part = self.skip(frozenset(range(2 * num_layers, 2 * self.num_layers)))
        return replace(part, exit=num_layers, skipped=())

    def skip(self, skipped: frozenset[int]) -> ChosenPart:
        agreement = float(np.mean([window.agreement(skipped) for window in self._windows]))
        kept = 1 - len(skipped) / (2 * self.num_layers)
        step_s = self._around_s + kept * self._layers_s
        cost = step_s / self._costs.at(1)
        forecast = max(
            forecast_speedup([agreement] * count, self._costs, count * step_s)
            for count in range(1, _LONGEST + 1)
        )
        return ChosenPart(None, tuple(sorted(skipped)), agreement, cost, forecast)


class _Window:
    """The end of a text, with the whole model's choice after each token."""

    def __init__(self, model: Model, text: Sequence[int], opened: ExitStack) -> None:
        recent = list(text[-_CONTEXT - _WINDOW - 1 :])
        before, self._tokens = recent[: -_WINDOW - 1], recent[-_WINDOW - 1 : -1]
        session = opened.enter_context(closing(model.open_session()))
        if not isinstance(session, SelfDrafting):
            raise UnsupportedModelError(
                "this runtime cannot run a model in part",
                remedy="Use --runtime ort on the CPU and a model that edge-spec converts by itself "
                "(docs/models.md).",
            )
        session.prefill(before)
        self._length = len(before)
        self._right = self._choices(session)
        self._part = opened.enter_context(closing(session.open_skipping(frozenset())))

    def influence(self) -> np.ndarray:
        self._part.rollback(self._length)
        return self._part.influence(self._tokens)

    def agreement(self, skipped: frozenset[int]) -> float:
        self._part.skipped = skipped
        return float((self._choices(self._part) == self._right).mean())

    def step_s(self, skipped: frozenset[int]) -> float:
        """Return the median seconds of a one-row pass."""
        self._part.skipped = skipped
        seconds = []
        for _ in range(_TIMED + 1):
            self._part.rollback(self._length)
            start = time.perf_counter()
            self._part.forward(TokenTree.chain(self._tokens[0]))
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])

    def _choices(self, session: Session) -> np.ndarray:
        """Return [window]: the likeliest token after each token."""
        session.rollback(self._length)
        out = session.forward(TokenTree.chain(self._tokens[0], self._tokens[1:]))
        choices: np.ndarray = out.logits.argmax(axis=1)
        return choices


def best_exit(judge: Judge) -> ChosenPart:
    """Return the exit with the best forecast."""
    layers = judge.num_layers
    exits = sorted({max(1, round(share * layers)) for share in _EXITS} - {layers})
    return max((judge.exit(layer) for layer in exits), key=_FORECAST)


def best_nested(judge: Judge) -> ChosenPart:
    """Return the best set of skipped sublayers, least influence first. Those without any come first
    together: skipping them is free."""
    influence = judge.influence()
    order = influence.argsort(kind="stable").tolist()
    useless = int((influence < _NO_INFLUENCE).sum())
    counts = {max(1, round(share * len(order))) for share in _SKIPPED} | {useless}
    counts |= {useless + round(share * (len(order) - useless)) for share in _SKIPPED}
    counts -= {0, len(order)}
    return max((judge.skip(frozenset(order[:count])) for count in sorted(counts)), key=_FORECAST)


def save_parts(bundle: Bundle, parts: Mapping[str, ChosenPart]) -> None:
    """Keep parts in the bundle, by drafter."""
    described = {name: asdict(part) for name, part in parts.items()}
    add_file(bundle, PARTS_FILE, (json.dumps(described, indent=2) + "\n").encode())


def saved_parts(bundle: Bundle) -> dict[str, ChosenPart]:
    """Return the bundle's parts by drafter. Raises BundleError for an invalid file."""
    if PARTS_FILE not in bundle.manifest.files:
        return {}
    path = bundle.file(PARTS_FILE)
    try:
        return TypeAdapter(dict[str, ChosenPart]).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise BundleError(
            f"{path} is not valid: {error.errors()[0]['msg']}", remedy="Run tune-skip again."
        ) from None
