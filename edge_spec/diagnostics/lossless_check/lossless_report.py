"""A proof as one document, and what it says in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from edge_spec.diagnostics.lossless_check.prove import Proof, Texts
from edge_spec.diagnostics.lossless_check.sampling import Sampling
from edge_spec.exactness.lossless import Promise
from edge_spec.placement.machine import describe_machine

Document = dict[str, Any]

_MORE = "Raise --count and --max-tokens, or name a --drafter that the model sometimes agrees with."
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
    left, sampling = [each for _, each in differences(report)], report["sampling"]
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


def differences(report: Document) -> Sequence[tuple[str, Document]]:
    """Returns the differences, each with the check that found each."""
    named = [("greedy", report["greedy"]), ("sampled", report["seeded"] or {"differing": []})]
    named.append(("repeated", report["determinism"]))
    return [(name, each) for name, of in named for each in of["differing"]]
