"""Report a benchmark's rates and ratios with intervals, as JSON and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.metrics import Stats
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    Answered,
    BenchMeasurement,
    Peer,
    Run,
    SampledMeasurement,
)
from edge_spec.diagnostics.report_files import Document, Page, Table, machine_line
from edge_spec.scheduler.machine import describe_machine

LEAST_ANSWERS = 2  # of both sides: a single pair does not show how ratios vary
NOT_ENOUGH = "not enough to tell"
_DRAWS = 2000
_QUANTILES = (0.025, 0.975)


class Interval(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """A side and its base, measured next to each other.

    values: float64 [4, prompts, repetitions]: tokens, seconds, and the base's tokens and seconds.
    """

    values: np.ndarray

    @property
    def rate(self) -> float:
        """All tokens over all seconds, with each prompt's median over repetitions."""
        tokens, seconds, _, _ = _totals(self.values)
        return float(tokens / seconds)

    @property
    def base_rate(self) -> float:
        _, _, tokens, seconds = _totals(self.values)
        return float(tokens / seconds)


def joined(strata: Sequence[Paired]) -> Paired:
    return Paired(np.concatenate([each.values for each in strata], axis=1))


def speedup(strata: Sequence[Paired], seed: int = 0) -> Interval:
    """Return the ratio of the overall rates, with a 95 % confidence interval.

    It is a percentile bootstrap (Efron 1979): it resamples prompts within each stratum, and each
    one's repetitions in pairs. It covers other prompts of these kinds on this machine, not other
    machines.
    """
    generator = np.random.default_rng(seed)
    drawn = sum((_resampled(each, generator) for each in strata), np.zeros((4, 1)))
    low, high = np.quantile(_ratio(drawn), _QUANTILES)
    return Interval(float(_ratio(_totals(joined(strata).values))), float(low), float(high))


def prompt_speedups(paired: Paired) -> list[Interval]:
    """Return each prompt's median, least and greatest ratio over its repetitions. The true median
    is between the latter two with a probability of 1 - 2 ** (1 - repetitions): 75% for three, 97%
    for six."""
    ratios = _ratio(paired.values)
    columns = (np.median(ratios, axis=1), ratios.min(axis=1), ratios.max(axis=1))
    return [Interval(*map(float, row)) for row in zip(*columns, strict=True)]


def _resampled(paired: Paired, generator: np.random.Generator) -> np.ndarray:
    _, num_prompts, repetitions = paired.values.shape
    prompts = generator.integers(num_prompts, size=(_DRAWS, num_prompts, 1))
    chosen = generator.integers(repetitions, size=(_DRAWS, num_prompts, repetitions))
    return _totals(paired.values[:, prompts, chosen])


def _totals(values: np.ndarray) -> np.ndarray:
    """Sum over prompts the medians over repetitions: [4, ..., prompts, repetitions] -> [4, ...]."""
    totals: np.ndarray = np.median(values, axis=-1).sum(axis=-1)
    return totals


def _ratio(totals: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_seconds = totals
    ratio: np.ndarray = tokens / seconds / (base_tokens / base_seconds)
    return ratio


MAX_PERIOD = 128  # tokens in a loop's passage
MIN_OCCURRENCES = 3


def in_loops(tokens: Sequence[int]) -> np.ndarray:
    """Return which tokens are in loops, [tokens] bool.

    In a loop of at least MIN_OCCURRENCES periods of at most MAX_PERIOD tokens, each token equals
    the one a period before it. The first occurrence does not count: nothing predicted it. Takes
    O(tokens * MAX_PERIOD).
    """
    text = np.asarray(tokens, np.int64)
    in_loop: np.ndarray = np.zeros(len(text), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(text) // MIN_OCCURRENCES) + 1):
        repeats = (text[period:] == text[:-period]).astype(np.int8)
        edges = np.flatnonzero(np.diff(repeats, prepend=0, append=0))
        for start, end in edges.reshape(-1, 2):
            if end - start >= (MIN_OCCURRENCES - 1) * period:
                in_loop[period + start : period + end] = True
    return in_loop


def _loop_share(runs: Sequence[Run]) -> float:
    num_tokens = sum(len(run.tokens) for run in runs)
    return int(sum(in_loops(run.tokens).sum() for run in runs)) / num_tokens if num_tokens else 0.0


_TIMES = ("draft_ms", "verify_ms", "overhead_ms")
_SPEEDUP = ("speedup", "speedup_low", "speedup_high")


def document(
    measured: BenchMeasurement,
    settings: Mapping[str, Any],
    peer: Peer | None = None,
    sampled: SampledMeasurement | None = None,
) -> Document:
    """Report at least one answer; docs/cli.md lists the fields."""
    answered = measured.answered
    found: Document = {
        "machine": describe_machine(),
        "settings": {
            **settings,
            "repetitions": len(answered[0].of(PLAIN)),
            "partial": measured.partial,
            "skipped_prompts": [prompt.id for prompt in measured.plan.skipped],
        },
        "total": _summary(answered),
        "categories": {name: _summary(each) for name, each in by_category(answered).items()},
        "prompts": [_prompt(each) for each in answered],
        "sampled": None,
        "peers": {} if peer is None else {peer.name: _peer(peer, measured)},
    }
    if sampled is not None:
        drawn = sampled.measured
        found["settings"]["partial"] |= drawn.partial
        if drawn.answered:
            total = _summary(drawn.answered)
            del total["differing_texts"]  # sampled texts differ anyway
            tasks = [each.task for each in drawn.answered]
            greedy = _summary([each for each in answered if each.task in tasks])
            found["sampled"] = {**sampled.how, "total": total, "greedy": greedy}
    return found


def by_category(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    found: dict[str, list[Answered]] = {}
    for each in answered:
        found.setdefault(each.task.prompt.category, []).append(each)
    return found


def _rates(answered: Sequence[Answered], side: str = DRAFTING, base: str = PLAIN) -> Document:
    """Return the rates of a side and its base, and their ratio.

    The ratio is None for fewer than LEAST_ANSWERS of each; for one prompt it is the median over
    repetitions. Prompts with untimed answers are left out, since other programs do not time the
    first token.
    """
    timed = [each for each in answered if all(run.num_tokens for run in each.of(side, base))]
    pairs = [_paired(each, side, base) for each in by_category(timed).values()]
    if not pairs:
        return {"predicted_per_second": None, "plain_per_second": None, **_named(None)}
    together, interval = joined(pairs), None
    _, num_prompts, repetitions = together.values.shape
    if num_prompts * repetitions >= LEAST_ANSWERS:
        interval = prompt_speedups(together)[0] if num_prompts == 1 else speedup(pairs)
    rates = {"predicted_per_second": together.rate, "plain_per_second": together.base_rate}
    return {**rates, **_named(interval)}


def _paired(answered: Sequence[Answered], side: str, base: str) -> Paired:
    values: list[list[list[float]]] = []
    for name in (side, base):
        values.append([[run.num_tokens for run in each.of(name)] for each in answered])
        values.append([[run.seconds for run in each.of(name)] for each in answered])
    return Paired(np.array(values, np.float64))


def _summary(answered: Sequence[Answered], side: str = DRAFTING, base: str = PLAIN) -> Document:
    stats = [run.stats for each in answered for run in each.of(side)]
    rounds = sum(each.rounds for each in stats)
    reasons = sum((each.plain_reasons for each in stats), Counter[str]())
    times = {name: sum(getattr(each, name) for each in stats) for name in _TIMES}
    loop_free = [each for each in answered if not _loop_share(each.of(side, base))]
    prompts = [_prompt(each, side, base) for each in answered]
    measured = [each for each in prompts if each["speedup"] is not None]
    worst = min(measured, key=lambda each: each["speedup"], default={})
    return {
        "prompts": len(answered),
        **_rates(answered, side, base),
        **_acceptance(stats),
        **_ratio_of(worst, "worst_prompt_speedup"),
        "worst_prompt": worst.get("id"),
        "plain_rounds": {reason: n / rounds for reason, n in reasons.items()} if rounds else {},
        **{f"{name}_a_round": ms / rounds if rounds else None for name, ms in times.items()},
        "loop_share": _loop_share([run for each in answered for run in each.of(base)]),
        "loop_free_prompts": len(loop_free),
        **_ratio_of(_rates(loop_free, side, base), "loop_free_speedup"),
        "differing_texts": sum(not each["equal_text"] for each in prompts),
    }


def _prompt(answered: Answered, side: str = DRAFTING, base: str = PLAIN) -> Document:
    prompt, runs = answered.task.prompt, answered.of(side)
    return {
        "id": prompt.id,
        "category": prompt.category,
        "predicted_n": runs[0].num_tokens,
        **_rates([answered], side, base),
        **_acceptance([run.stats for run in runs]),
        "loop_share": _loop_share(answered.of(base)),
        "equal_text": len({run.tokens for run in answered.of(side, base)}) == 1,
    }


def _named(interval: Interval | None) -> Document:
    return dict(zip(_SPEEDUP, interval or (None, None, None), strict=True))


def _ratio_of(figures: Document, name: str) -> Document:
    return {key.replace("speedup", name): figures.get(key) for key in _SPEEDUP}


def _acceptance(stats: Sequence[Stats]) -> dict[str, float | None]:
    rounds, drafted = sum(s.rounds for s in stats), sum(s.draft_n for s in stats)
    return {
        "mean_accepted_length": sum(s.predicted_n for s in stats) / rounds if rounds else None,
        "acceptance_rate": sum(s.draft_n_accepted for s in stats) / drafted if drafted else None,
    }


def _peer(peer: Peer, measured: BenchMeasurement) -> Document:
    """Return another program's speedup, and our rate over its two."""
    answered = measured.answered
    plain, drafting = (name in answered[0].runs for name in (peer.plain, peer.drafting))
    found = _summary(answered if plain and drafting else [], peer.drafting, peer.plain)
    for what, base, ran in (("plain", peer.plain, plain), ("predicted", peer.drafting, drafting)):
        rates = _rates(answered, base=base) if ran else {}
        found[f"{what}_per_second"] = rates.get("plain_per_second")
        found |= _ratio_of(rates, f"ours_over_{what}")
    failures = [measured.failures.get(side.name) for side in peer.sides]
    return {
        "version": peer.version,
        "weights": peer.weights,
        "settings": peer.settings,
        **found,
        "note": "; ".join(filter(None, [peer.note, *failures])) or None,
    }


def page(report: Document) -> Page:
    settings, total = report["settings"], report["total"]
    where = f"{settings['model']} on {settings['runtime']}, drafter {settings['drafter']}"
    yield f"edge-spec bench: {where}"
    if settings["partial"]:
        yield "Partial: interrupted before all prompts were answered."
    yield machine_line(report["machine"])
    yield (
        f"Weights: {settings['weights']}. Prompts: {total['prompts']} ({settings['prompts']}), "
        f"each answered {settings['repetitions']} times with drafting and, in turns, by plain "
        f"decoding: greedy, at most {settings['max_tokens']} tokens, the prompt not timed."
    )
    yield "Tokens a second, and their ratio with its 95 % confidence interval:"
    rows = [*report["categories"].items(), ("all", total)]
    yield Table(("category", *_SPEEDS), [(name, *_speeds(of)) for name, of in rows])
    yield " ".join(_remarks(report))
    if sampled := report["sampled"]:
        yield (
            f"Sampled: {sampled['sampling']} ({sampled['source']}), each answer drawn again; at "
            f"most {sampled['per_category']} prompts of each category."
        )
        same = (("greedy", sampled["greedy"]), ("sampled", sampled["total"]))
        yield Table(("same prompts", *_SPEEDS), [(name, *_speeds(of)) for name, of in same])
    for name, of in report["peers"].items():
        yield f"{name}: {'; '.join(_of_peer(of))}."


_SPEEDS = ("prompts", "plain", "drafting", "speedup", "accepted")


def _speeds(of: Document) -> list[str]:
    rates = [_number(of[f"{name}_per_second"], 1) for name in ("plain", "predicted")]
    return [str(of["prompts"]), *rates, _interval(of, "speedup"), _share(of["acceptance_rate"])]


def _remarks(report: Document) -> Iterator[str]:
    settings, total = report["settings"], report["total"]
    yield f"{total['differing_texts']} of {total['prompts']} texts differ from plain decoding's."
    if total["worst_prompt"] is not None:
        yield f"Worst prompt: {total['worst_prompt_speedup']:.2f} ({total['worst_prompt']})."
    yield (
        f"In loops: {_share(total['loop_share'])} of plain decoding's tokens repeat a passage in "
        f"place, which is easy to draft; speedup of the {total['loop_free_prompts']} prompts "
        f"without any: {_interval(total, 'loop_free_speedup')}."
    )
    if total["mean_accepted_length"] is not None:
        times = ", ".join(
            f"{name.removesuffix('_ms')} {_number(total[f'{name}_a_round'], 2)} ms"
            for name in _TIMES
        )
        reasons = [f"{reason} {_share(share)}" for reason, share in total["plain_rounds"].items()]
        yield (
            f"A step writes {total['mean_accepted_length']:.2f} tokens: {times}. Steps without "
            f"draft tokens: {', '.join(reasons) or 'none'}."
        )
    if total["plain_rounds"].get("off") == 1:
        yield "Drafting was off in every step, so both ways are plain decoding."
    if "lossless" in settings:  # else it was another program's engine
        yield f"Promised of the texts: {settings['lossless']}."
        if settings["plain_cost"] > 1 and total["speedup"] is not None:
            yield (
                f"A plain step takes {settings['plain_cost']:.2f} times the fastest possible one; "
                f"over that one the speedup is {total['speedup'] / settings['plain_cost']:.2f}."
            )
    if settings["skipped_prompts"]:
        yield f"Too long for the context, left out: {', '.join(settings['skipped_prompts'])}."


def _of_peer(of: Document) -> Iterator[str]:
    if of["version"]:
        yield f"{of['version']}, {of['weights']}"
    yield from of["settings"]
    if of["plain_per_second"] is not None:
        yield (
            f"{_number(of['plain_per_second'], 1)} tokens a second plain, "
            f"{_number(of['predicted_per_second'], 1) or 'none'} drafting, its speedup "
            f"{_interval(of, 'speedup')}; ours over its plain rate "
            f"{_interval(of, 'ours_over_plain')}, over its drafting "
            f"{_interval(of, 'ours_over_predicted')}"
        )
    if of["note"]:
        yield of["note"]


def _interval(of: Mapping[str, Any], name: str) -> str:
    if of.get(name) is None:
        return NOT_ENOUGH
    return f"{of[name]:.2f} ({of[f'{name}_low']:.2f} to {of[f'{name}_high']:.2f})"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
