"""A proof as one document, and that document for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from edge_spec.diagnostics.lossless_check.prove import Proof, Texts
from edge_spec.diagnostics.lossless_check.sampling import Sampling
from edge_spec.exactness.lossless import Promise
from edge_spec.placement.machine import describe_machine

if TYPE_CHECKING:
    from rich.console import Console

Document = dict[str, Any]

_SHOWN = 8  # differences in a terminal
_MORE = "Raise --count and --max-tokens, or name a --drafter that the model sometimes agrees with."
_COLOURS = {"pass": "green", "fault": "red", "ties": "yellow", "open": "yellow"}
_VERDICTS = {"pass": "pass", "fault": "fail", "ties": "ties", "open": "inconclusive"}


def document(proof: Proof, device: str) -> Document:
    """docs/lossless.md lists the fields."""
    machine = describe_machine()
    versions = machine.pop("versions")
    return {
        "verdict": _VERDICTS[_mark(proof.passed, len(proof.differing))],
        "model": proof.model,
        "runtime": proof.runtime,
        "device": device,
        "drafter": proof.drafter,
        "lossless": str(proof.lossless.mode),
        "promise": str(proof.lossless.promise),
        "greedy": _texts(proof.greedy),
        "seeded": None if proof.seeded is None else _texts(proof.seeded),
        "sampling": None if proof.sampling is None else _sampling(proof.sampling),
        "determinism": {
            **asdict(proof.determinism),
            "missing": proof.determinism.missing,
            "num_differing": len(proof.determinism.differing),
            "passed": proof.determinism.passed,
        },
        "not_exercised": list(proof.not_exercised),
        "skipped_prompts": list(proof.skipped),
        "machine": machine,
        "versions": versions,
    }


def summary(report: Document) -> str:
    """The verdict in a sentence or two, for those who want no more."""
    left, sampling = [each for _, each in _differences(report)], report["sampling"]
    only_texts = not sampling or (sampling["passed"] and not sampling["within_noise_only"])
    advice = "see whether --exact helps"
    if report["verdict"] == "fail":
        advice = advice if report["promise"] == Promise.TIES else "this is a fault: report it"
        return f"Speculation changes what this model writes; {advice}."
    if report["verdict"] == "inconclusive":
        keys = {"greedy": "greedy text", "seeded": "sampled text", "sampling": "distribution"}
        keys["determinism"] = "determinism"
        open_parts = {key: report[key] for key in keys if report[key]}
        why = "; ".join(
            f"{keys[key]}: {part['missing']}"
            for key, part in open_parts.items()
            if part["passed"] is None
        )
        return f"Too little happened to show anything ({why}). {_MORE}"
    if not left and only_texts:
        return "Speculation changes nothing: the text is the model's own."
    if not left:
        return f"Equal up to rounding, within this machine's numeric noise; {advice}."
    texts = f"{len(left)} text{'s' if len(left) > 1 else ''}"
    return f"{texts} part from plain ones at near ties, which this mode allows; {advice}."


def checks(report: Document) -> list[tuple[str, str, str]]:
    """Name, mark and figures of each check that was made. A mark is "pass", "ties" (texts part, at
    near ties that the mode allows), "fault", or "open" where nothing was shown."""
    found = []
    for name, key in (("greedy text", "greedy"), ("sampled text", "seeded")):
        texts = report[key]
        if texts:
            mark = _mark(texts["passed"], texts["num_differing_prompts"])
            found.append((name, mark, _told(texts, mark, report["lossless"])))
    sampling, repeated = report["sampling"], report["determinism"]
    if sampling:
        drafted = sampling["origins"]
        found.append(
            (
                "distribution",
                _mark(sampling["passed"], 0),
                f"{sampling['num_draws']:,} draws of {sampling['num_tokens']} tokens "
                f"({drafted['accepted']:,} accepted, {drafted['recovered']:,} recovered, "
                f"{drafted['bonus']:,} bonus): p at most {sampling['p_value']:.2g}; total "
                f"variation {sampling['total_variation']:.4f}, bound "
                f"{sampling['total_variation_bound']:.4f}",
            )
        )
    widths = ", ".join(str(width) for width in repeated["invariant_widths"])
    found.append(
        (
            "determinism",
            _mark(repeated["passed"], repeated["num_differing"]),
            f"{repeated['num_differing']} of {repeated['runs']} runs differ from the first; rows "
            f"equal bit for bit in passes of {widths}; noise {repeated['tie_margin']:.4f}",
        )
    )
    return found


def print_report(report: Document, console: Console) -> None:
    """One screen of 80 columns, but for many differences."""
    from rich.table import Table
    from rich.text import Text

    console.print(
        Text(_printable(f"{report['model']} on {report['runtime']}, drafter {report['drafter']}"))
        + Text(f"; promised: {report['promise']}")
    )
    colour = {"pass": "green", "fail": "red"}.get(report["verdict"], "yellow")
    said = {"ties": "NEAR TIES"}.get(report["verdict"], report["verdict"].upper())
    verdict = Text(said, style=f"bold {colour}")
    console.print(verdict + Text(f"  {summary(report)}", style="not bold default"))
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, mark, figures in checks(report):
        table.add_row(Text(mark, style=_COLOURS[mark]), name, Text(figures))
    console.print(table)
    _print_differences(report, console)
    for claim in report["not_exercised"]:
        console.print(Text(f"not exercised: {claim}"))
    machine = report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    console.print()
    console.print(
        Text(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}"),
        style="dim",
    )
    if report["skipped_prompts"]:
        ids = _printable(", ".join(report["skipped_prompts"]))
        console.print(Text(f"Left out, for the context has no room for them: {ids}."))


def _texts(texts: Texts) -> Document:
    return {
        **asdict(texts),
        "num_rejected": texts.num_rejected,
        "missing": texts.missing,
        "num_differing_prompts": len(texts.differing),
        "passed": texts.passed,
    }


def _sampling(sampling: Sampling) -> Document:
    return {
        "num_tokens": sampling.num_tokens,
        "origins": sampling.origins,
        "missing": sampling.missing,
        **asdict(sampling.fit),
        "p_value": sampling.fit.p_value,
        "noise_bound": sampling.noise_bound,
        "told_apart": sampling.told_apart,
        "within_noise_only": sampling.within_noise and not sampling.fit.passed,
        "passed": sampling.passed,
    }


def _mark(passed: bool | None, num_differing: int) -> str:
    if passed is None:
        return "open"
    if not passed:
        return "fault"
    return "ties" if num_differing else "pass"


def _told(texts: Document, mark: str, mode: str) -> str:
    """Words what came of a comparison: nobody is to read that texts that differ have passed."""
    left, count = texts["num_differing_prompts"], texts["num_prompts"]
    near = sum(each["near_tie"] for each in texts["differing"])
    if not left:
        said = f"bit-identical to plain ones: all {count} texts"
    elif mark == "ties":
        said = f"{left} of {count} texts part at near ties (allowed by --lossless {mode})"
    else:
        said = f"{left - near} of {count} texts differ: fault"
        said += f"; {near} more part at near ties" if near else ""
    return (
        f"{said}, {texts['num_tokens']:,} tokens; {texts['num_accepted']:,} of "
        f"{texts['num_guesses']:,} draft tokens accepted"
    )


def _differences(report: Document) -> Sequence[tuple[str, Document]]:
    """Returns the differences, each with the check that found each."""
    named = [("greedy", report["greedy"]), ("sampled", report["seeded"] or {"differing": []})]
    named.append(("repeated", report["determinism"]))
    return [(name, each) for name, of in named for each in of["differing"]]


def _print_differences(report: Document, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    found = _differences(report)
    if not found:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("text", "prompt", "token", "plain", "got", "margin", "tie"):
        long = column in ("prompt", "plain", "got")
        table.add_column(column, no_wrap=True, min_width=None if long else len(column))
    for name, each in found[:_SHOWN]:
        margin = "" if each["margin"] is None else f"{each['margin']:.4f}"
        near = "yes" if each["near_tie"] else "no"
        cells = [name, _printable(each["prompt"]), str(each["token_index"]), repr(each["expected"])]
        table.add_row(*map(Text, [*cells, repr(each["got"]), margin, near]))
    console.print()
    console.print(table)
    if len(found) > _SHOWN:
        console.print(f"and {len(found) - _SHOWN} more: --json lists all")


def _printable(text: str) -> str:
    """Removes what a terminal would take for a command."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
