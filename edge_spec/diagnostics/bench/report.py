"""Makes the figures that are reported of what was measured, says how sure they are, and writes them
as one document and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.metrics import Stats
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    BenchMeasurement,
    OpenPeer,
    Run,
    SampledMeasurement,
    Task,
)
from edge_spec.diagnostics.report_files import machine_line, markdown_table
from edge_spec.scheduler.machine import describe_machine

_DRAWS = 2000
_QUANTILES = (0.025, 0.975)


class Interval(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Holds what the same prompts took one way, and right beside it in time another: the base.

    values: float64 [4, prompts, repetitions]; tokens, seconds, tokens and seconds of the base.
    """

    values: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens a second: all tokens over all seconds, those of a prompt being the median over
        its repetitions."""
        tokens, seconds, _, _ = _totals(self.values)
        return float(tokens / seconds)

    @property
    def base_rate(self) -> float:
        _, _, tokens, seconds = _totals(self.values)
        return float(tokens / seconds)


def joined(strata: Sequence[Paired]) -> Paired:
    return Paired(np.concatenate([each.values for each in strata], axis=1))


def speedup(strata: Sequence[Paired], seed: int = 0) -> Interval:
    """The rate of all prompts over the base's, with a 95 % confidence interval.

    The interval is the percentile bootstrap's (Efron 1979): prompts are drawn again within each
    stratum, and for each drawn prompt its repetitions, a repetition and its neighbour together.
    It tells of other prompts of these kinds on this machine, not of other machines.
    """
    generator = np.random.default_rng(seed)
    drawn = sum((_resampled(each, generator) for each in strata), np.zeros((4, 1)))
    low, high = np.quantile(_ratio(drawn), _QUANTILES)
    return Interval(float(_ratio(_totals(joined(strata).values))), float(low), float(high))


def prompt_speedups(paired: Paired) -> list[Interval]:
    """Returns for each prompt the median of its repetitions' ratios to their neighbours, and the
    least and the greatest of them. These two enclose the median of all repetitions that could have
    been made with a probability of 1 - 2 ** (1 - repetitions): 75 % for three, 97 % for six."""
    ratios = _ratio(paired.values)
    columns = (np.median(ratios, axis=1), ratios.min(axis=1), ratios.max(axis=1))
    return [Interval(*map(float, row)) for row in zip(*columns, strict=True)]


def _resampled(paired: Paired, generator: np.random.Generator) -> np.ndarray:
    _, num_prompts, repetitions = paired.values.shape
    prompts = generator.integers(num_prompts, size=(_DRAWS, num_prompts, 1))
    chosen = generator.integers(repetitions, size=(_DRAWS, num_prompts, repetitions))
    return _totals(paired.values[:, prompts, chosen])


def _totals(values: np.ndarray) -> np.ndarray:
    """[4, ...] over prompts, of the medians over repetitions; values: [4, ..., prompts, reps]."""
    totals: np.ndarray = np.median(values, axis=-1).sum(axis=-1)
    return totals


def _ratio(totals: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_seconds = totals
    ratio: np.ndarray = tokens / seconds / (base_tokens / base_seconds)
    return ratio


_TIMES = ("draft_ms", "verify_ms", "overhead_ms")

MAX_PERIOD = 128  # tokens of a passage
MIN_OCCURRENCES = 3


class Figures:
    def __init__(self, measured: BenchMeasurement) -> None:
        self._measured = measured
        self._by_category: dict[str, list[int]] = {}  # indices of tasks
        for i, task in enumerate(measured.tasks):
            self._by_category.setdefault(task.prompt.category, []).append(i)

    def total(self, tasks: Sequence[Task] | None = None) -> dict[str, Any]:
        """tasks: None: all."""
        measured = self._measured.tasks
        strata = self._strata(lambda i: tasks is None or measured[i] in tasks)
        return self._summary(DRAFTING, PLAIN, strata)

    def categories(self) -> dict[str, dict[str, Any]]:
        return {
            category: self._summary(DRAFTING, PLAIN, [indices])
            for category, indices in self._by_category.items()
        }

    def prompts(self) -> list[dict[str, Any]]:
        """Each one's speedup is the median of its repetitions' ratios."""
        tasks = self._measured.tasks
        paired = self._paired(DRAFTING, PLAIN, range(len(tasks)))
        found = []
        for i, (task, interval) in enumerate(zip(tasks, prompt_speedups(paired), strict=True)):
            alone = self._paired(DRAFTING, PLAIN, [i])
            drafted = self._runs([i], DRAFTING)
            found.append(
                {
                    "id": task.prompt.id,
                    "category": task.prompt.category,
                    "predicted_n": drafted[0].num_tokens,
                    "predicted_per_second": alone.rate,
                    "plain_per_second": alone.base_rate,
                    **_named("speedup", interval),
                    **_acceptance([run.stats for run in drafted]),
                    "loop_share": _loop_share(self._runs([i], PLAIN)),
                    "equal_text": self._equal_text(i, DRAFTING, PLAIN),
                }
            )
        return found

    def peer(self, looking_up: str | None, plain: str | None) -> dict[str, Any]:
        """Returns the figures of another library's side with speculation and its plain side, where
        it has them: its own speedup, and our rate over each of its two."""
        figures: dict[str, Any] = dict.fromkeys(_FIGURES)
        # Without prompts where a library's time begins with its only token.
        strata = self._strata(
            lambda i: all(run.num_tokens for run in self._runs([i], looking_up, plain))
        )
        if plain is None or not strata:
            return figures
        if looking_up is not None:
            summary = self._summary(looking_up, plain, strata)
            figures |= {name: summary[name] for name in _FIGURES}
        for name, side in (("plain", plain), ("predicted", looking_up)):
            if side is not None:
                paired = [self._paired(DRAFTING, side, indices) for indices in strata]
                figures[f"{name}_per_second"] = joined(paired).base_rate
                figures |= _named(f"ours_over_{name}", speedup(paired))
        return figures

    def _strata(self, keeps: Callable[[int], bool]) -> list[list[int]]:
        """Returns the prompts that are kept, by category."""
        strata = [[i for i in indices if keeps(i)] for indices in self._by_category.values()]
        return [indices for indices in strata if indices]

    def _summary(self, side: str, base: str, strata: Sequence[Sequence[int]]) -> dict[str, Any]:
        pairs = [self._paired(side, base, indices) for indices in strata]
        together = joined(pairs)
        indices = [i for of_category in strata for i in of_category]
        stats = [run.stats for run in self._runs(indices, side)]
        worst, interval = min(
            zip(indices, prompt_speedups(together), strict=True), key=lambda each: each[1].value
        )
        return {
            "prompts": len(indices),
            "predicted_per_second": together.rate,
            "plain_per_second": together.base_rate,
            **_named("speedup", speedup(pairs)),
            **_acceptance(stats),
            **_named("worst_prompt_speedup", interval),
            "worst_prompt": self._measured.tasks[worst].prompt.id,
            **_rounds(stats),
            "loop_share": _loop_share(self._runs(indices, base)),
            **self._without_loops(side, base, strata),
            "differing_texts": sum(not self._equal_text(i, side, base) for i in indices),
        }

    def _without_loops(
        self, side: str, base: str, strata: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Returns the speedup over the prompts none of whose answers has a token in a loop."""
        kept = [
            [i for i in indices if not _loop_share(self._runs([i], side, base))]
            for indices in strata
        ]
        pairs = [self._paired(side, base, indices) for indices in kept if indices]
        interval = _named("loop_free_speedup", speedup(pairs)) if pairs else _NO_LOOP_FREE
        return {"loop_free_prompts": sum(map(len, kept)), **interval}

    def _equal_text(self, index: int, *sides: str) -> bool:
        return len({run.tokens for run in self._runs([index], *sides)}) == 1

    def _runs(self, indices: Sequence[int], *sides: str | None) -> list[Run]:
        runs = self._measured.runs
        return [of_pass[i] for side in sides if side for i in indices for of_pass in runs[side]]

    def _paired(self, side: str, base: str, indices: Sequence[int]) -> Paired:
        arrays = []
        for name in (side, base):
            passes = self._measured.runs[name]
            runs = [[of_pass[i] for of_pass in passes] for i in indices]
            arrays.append(np.array([[float(run.num_tokens) for run in row] for row in runs]))
            arrays.append(np.array([[run.seconds for run in row] for row in runs]))
        return Paired(np.stack(arrays))


_FIGURES = (
    *("predicted_per_second", "plain_per_second", "speedup", "speedup_low", "speedup_high"),
    *("mean_accepted_length", "acceptance_rate"),
    *("worst_prompt_speedup", "worst_prompt_speedup_low", "worst_prompt_speedup_high"),
    "worst_prompt",
)


_NO_LOOP_FREE = dict.fromkeys(f"loop_free_speedup{end}" for end in ("", "_low", "_high"))


def _loop_share(runs: Sequence[Run]) -> float:
    num_tokens = sum(len(run.tokens) for run in runs)
    return int(sum(in_loops(run.tokens).sum() for run in runs)) / num_tokens if num_tokens else 0.0


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _acceptance(stats: Sequence[Stats]) -> dict[str, float | None]:
    """Returns figures of acceptance; None where the side does not state them."""
    rounds, drafted = sum(s.rounds for s in stats), sum(s.draft_n for s in stats)
    return {
        "mean_accepted_length": sum(s.predicted_n for s in stats) / rounds if rounds else None,
        "acceptance_rate": sum(s.draft_n_accepted for s in stats) / drafted if drafted else None,
    }


def _rounds(stats: Sequence[Stats]) -> dict[str, Any]:
    """Shares of plain rounds by reason, and where the time of a round goes."""
    rounds = sum(s.rounds for s in stats)
    reasons = sum((s.plain_reasons for s in stats), Counter[str]())
    return {
        "plain_rounds": {reason: n / rounds for reason, n in reasons.items()} if rounds else {},
        **{
            f"{name}_a_round": sum(getattr(s, name) for s in stats) / rounds if rounds else None
            for name in _TIMES
        },
    }


def in_loops(tokens: Sequence[int]) -> np.ndarray:
    """[tokens] bool: which of them lie in loops.

    A loop is a stretch of the text in which each token equals the one `period` tokens before it,
    for a period of at most MAX_PERIOD tokens, and which is at least MIN_OCCURRENCES periods long.
    The first occurrence of the passage is no part of it: nothing foretold it. Takes time
    proportional to the text's length times MAX_PERIOD.
    """
    text = np.asarray(tokens, np.int64)
    in_loop: np.ndarray = np.zeros(len(text), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(text) // MIN_OCCURRENCES) + 1):
        repeats = text[period:] == text[:-period]
        for start, end in _runs(repeats):
            if end - start >= (MIN_OCCURRENCES - 1) * period:
                in_loop[period + start : period + end] = True
    return in_loop


def _runs(values: np.ndarray) -> np.ndarray:
    """[runs, 2]: where true values begin that stand next to each other, and where they end."""
    edges = np.flatnonzero(np.diff(values.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2)


Document = dict[str, Any]


def document(
    measured: BenchMeasurement,
    settings: Mapping[str, Any],
    peers: Sequence[OpenPeer],
    sampled: SampledMeasurement | None = None,
) -> Document:
    """Makes the document of a measurement with at least one run; docs/cli.md lists the fields."""
    figures = Figures(measured)
    return {
        "machine": describe_machine(),
        "settings": {
            **settings,
            "repetitions": len(next(iter(measured.runs.values()))),
            "partial": measured.partial or (sampled is not None and sampled.measured.partial),
            "skipped_prompts": [prompt.id for prompt in measured.plan.skipped],
        },
        "total": figures.total(),
        "categories": figures.categories(),
        "prompts": figures.prompts(),
        "sampled": None if sampled is None else _sampled(sampled, figures),
        "peers": {each.name: _peer(each, figures, measured) for each in peers},
    }


def _sampled(sampled: SampledMeasurement, figures: Figures) -> Document | None:
    """Returns None where an interrupt came before any prompt was answered."""
    tasks = sampled.measured.tasks
    if not tasks:
        return None
    total = Figures(sampled.measured).total()
    del total["differing_texts"]  # they are drawn again
    return {
        "sampling": sampled.sampling,
        "source": sampled.source,
        "per_category": sampled.per_category,
        "total": total,
        "greedy": figures.total(tasks),
    }


def _peer(opened: OpenPeer, figures: Figures, measured: BenchMeasurement) -> dict[str, Any]:
    working = [side for side in opened.sides if side.name in measured.runs]
    names = {side: side.name for side in working}
    plain = names.get(opened.plain) if opened.plain else None
    looking_up = names.get(opened.looking_up) if opened.looking_up else None
    failures = [measured.failures.get(side.name) for side in opened.sides]
    return {
        "version": next((side.version for side in opened.sides), None),
        "weights": opened.weights,
        "settings": [side.settings for side in opened.sides],
        **figures.peer(looking_up, plain),
        "note": "; ".join(filter(None, [opened.note, *failures])) or None,
    }


def markdown(report: Document) -> str:
    """Renders what `document` returned, or what was read back from its JSON."""
    settings, machine, total = report["settings"], report["machine"], report["total"]
    ids, skipped = settings["skipped_prompts"], []
    if ids:
        skipped = [f"Left out, for the context has no room for them: {', '.join(ids)}."]
    lines = [
        f"# edge-spec bench: {settings['model']} on {settings['runtime']}, "
        f"drafter {settings['drafter']}",
        "",
        *(["**Partial: interrupted before all was measured.**", ""] if settings["partial"] else []),
        machine_line(machine),
        f"Weights: {settings['weights']}. Prompts: {total['prompts']} ({settings['prompts']}), in "
        f"turns with plain decoding, repetitions: {settings['repetitions']}, at most "
        f"{settings['max_tokens']} tokens, greedy, decoding alone.",
        "",
        *_speedups(report),
        "",
        f"Texts that differ from plain decoding's: {total['differing_texts']} of "
        f"{total['prompts']}. In brackets: 95 % confidence intervals, and for a prompt the range "
        "of its repetitions.",
        *_loops(total),
        *_lossless(report),
        *_own_loop(settings),
        *skipped,
        "",
        *_rounds_table(report),
    ]
    if report["sampled"]:
        lines += ["", *_greedy_and_sampled(report["sampled"])]
    if report["peers"]:
        lines += ["", *_peers(report)]
    return "\n".join(lines) + "\n"


def _loops(total: Mapping[str, Any]) -> list[str]:
    """Says how much the speedup may be flattered by texts that repeat themselves."""
    lines = [
        f"In loops: {_share(total['loop_share'])} of plain decoding's tokens repeat, in place, a "
        f"passage of at most {MAX_PERIOD} tokens that stands there {MIN_OCCURRENCES} times or more."
    ]
    if total["loop_free_speedup"] is not None:
        lines.append(
            f"Over the prompts without any ({total['loop_free_prompts']}), the speedup is "
            f"{_interval(total, 'loop_free_speedup')}."
        )
    return lines


_SPEEDUP_HEADER = (
    *("prompts", "plain tokens/s", "tokens/s", "speedup", "tokens a round", "accepted"),
    *("in loops", "speedup without loops"),
)


def _speedup_cells(of: Mapping[str, Any]) -> list[str]:
    without = f"{_interval(of, 'loop_free_speedup')} of {of['loop_free_prompts']}"
    return [
        str(of["prompts"]),
        _number(of["plain_per_second"], 1),
        _number(of["predicted_per_second"], 1),
        _interval(of, "speedup"),
        _number(of["mean_accepted_length"], 2),
        _share(of["acceptance_rate"]),
        _share(of["loop_share"]),
        without if of["loop_free_speedup"] is not None else "",
    ]


def _greedy_and_sampled(sampled: Mapping[str, Any]) -> list[str]:
    header = ["the same prompts", *_SPEEDUP_HEADER]
    sides = (("greedy", sampled["greedy"]), ("sampled", sampled["total"]))
    rows = [[name, *_speedup_cells(of)] for name, of in sides]
    return [
        f"Sampled: {sampled['sampling']} ({sampled['source']}), each answer drawn again; "
        f"prompts of each category: {sampled['per_category']} at most.",
        "",
        *markdown_table(header, rows),
    ]


def _lossless(report: Document) -> list[str]:
    """States what was promised of the texts, and the rate over the fastest plain steps."""
    settings, speedup = report["settings"], report["total"]["speedup"]
    if "lossless" not in settings:  # of another program's engine
        return []
    lines = [f"Promised: {settings['lossless']}."]
    if settings["plain_cost"] > 1 and speedup is not None:
        lines.append(
            f"A plain step takes {settings['plain_cost']:.2f} times the fastest: over that one "
            f"the speedup is {speedup / settings['plain_cost']:.2f}."
        )
    if settings.get("policy"):
        lines.append(f"At the end the policy went by this: {settings['policy']}.")
    return lines


def _own_loop(settings: Mapping[str, Any]) -> list[str]:
    """Says whether the library itself would decode faster without speculation."""
    cost = settings.get("own_loop_cost")
    if cost is None:
        return []
    return [f"A row of ours takes {cost:.2f} of a plain step of {settings['runtime']}'s own loop."]


def _rows(report: Document) -> Iterable[tuple[str, dict[str, Any]]]:
    yield from report["categories"].items()
    yield "all", report["total"]


def _speedups(report: Document) -> list[str]:
    header = ["category", *_SPEEDUP_HEADER, "worst prompt"]
    rows = [
        [
            category,
            *_speedup_cells(of),
            f"{_interval(of, 'worst_prompt_speedup')} {of['worst_prompt']}",
        ]
        for category, of in _rows(report)
    ]
    return markdown_table(header, rows)


def _rounds_table(report: Document) -> list[str]:
    header = ["category", "rounds without a draft token", "draft, ms a round", "verify", "overhead"]
    rows = []
    for category, of in _rows(report):
        reasons = [f"{reason} {_share(share)}" for reason, share in of["plain_rounds"].items()]
        times = [_number(of[f"{name}_ms_a_round"], 2) for name in ("draft", "verify", "overhead")]
        rows.append([category, ", ".join(reasons) or "none", *times])
    return markdown_table(header, rows)


def _peers(report: Document) -> list[str]:
    header = [
        *("library", "weights", "plain tokens/s", "with speculation", "its speedup"),
        *("ours over its plain", "ours over its speculation"),
    ]
    rows, notes = [], []
    for name, of in report["peers"].items():
        if of["plain_per_second"] is not None:
            rows.append(
                [
                    f"{name} {of['version']}",
                    of["weights"],
                    _number(of["plain_per_second"], 1),
                    _number(of["predicted_per_second"], 1),
                    _interval(of, "speedup"),
                    _interval(of, "ours_over_plain"),
                    _interval(of, "ours_over_predicted"),
                ]
            )
            notes.append(f"- {name}: {'; '.join(of['settings'])}")
        if of["note"]:
            notes.append(f"- {name}: {of['note']}")
    return [*(markdown_table(header, rows) if rows else []), "", *notes]


def _interval(of: Mapping[str, Any], name: str) -> str:
    if of.get(name) is None:
        return ""
    return f"{of[name]:.2f} ({of[f'{name}_low']:.2f} to {of[f'{name}_high']:.2f})"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
