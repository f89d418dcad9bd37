"""A measurement as one document, and that document as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_spec.diagnostics.bench.figures import MAX_PERIOD, MIN_OCCURRENCES, Figures
from edge_spec.diagnostics.bench.measuring import BenchMeasurement, SampledMeasurement
from edge_spec.diagnostics.bench.peers import OpenPeer
from edge_spec.diagnostics.report_files import machine_line, markdown_table
from edge_spec.placement.machine import describe_machine

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
        *_rounds(report),
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


def _rounds(report: Document) -> list[str]:
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
