"""`edge-spec bench`, `verify` and `doctor`: what drafting gains on this machine, whether it changes
what a model writes, and whether a model works here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.options import open_engine
from edge_spec.cli.output import ProgressBar, page_lines, print_result, printable, table_lines
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.diagnostics.report_files import machine_line, require_writable, write_report
from edge_spec.errors import UsageError, readable
from edge_spec.models.asked_options import option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_spec.core.model import Progress
    from edge_spec.diagnostics.bench.measuring import (
        BenchMeasurement,
        BenchPlan,
        Peer,
        PeerChoice,
        SampledMeasurement,
    )
    from edge_spec.diagnostics.bench.report import Document
    from edge_spec.diagnostics.doctor.report import Finding, Report
    from edge_spec.diagnostics.lossless_check.prove import Proof
    from edge_spec.engine.engine import Engine
    from edge_spec.models.options import LoadOptions
    from edge_spec.text.prompt_files import Prompt


_PEER_WEIGHTS = "Q4_0"  # what all other libraries that read GGUF files read


@dataclass(frozen=True)
class BenchOptions:
    prompts: Path | None = option(
        None, "JSON lines with id, category, and prompt or turns; without it, ours."
    )
    max_tokens: int = option(128, "Most tokens of an answer.", least=1)
    repeat: int = option(3, "How often each prompt is answered.", least=1)
    per_category: int | None = option(None, "Most prompts of a category.", least=1)
    sampled: int = option(
        2,
        "Prompts of a category that are answered as the model's makers sample, too; 0: none.",
        least=0,
    )
    out: Path | None = option(None, "A directory for report.md and report.json.")
    peers: bool = option(False, "Measure llama-cpp-python and llama-server, too.", flag="--peers")


@options.with_groups
def bench(
    model: options.Model = "smollm2",
    *,
    asked: BenchOptions,
    loading: options.AskedOptions,
    explain: options.Explain = False,
    json: options.Json = False,
) -> None:
    """Measure drafting against plain decoding, in turns, by kind of text."""
    from edge_spec.diagnostics.bench.measuring import make_plan
    from edge_spec.diagnostics.bench.report import document
    from edge_spec.scheduler.measure import own_loop_cost
    from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

    entries = read_prompts(asked.prompts or OWN_PROMPTS, asked.per_category)
    _require_forgetful(loading, asked.repeat)
    if asked.out is not None:
        require_writable(asked.out)
    choice = _peer_choice(model, loading) if asked.peers else None
    opened = str(choice.gguf) if choice else model
    with open_engine(opened, loading, explain=explain) as engine:
        plan = make_plan(engine, entries, asked.max_tokens, asked.repeat)
        num_sampled = 0 if _remembering(loading) else asked.sampled
        measured, open_peers, drawn = _measure(engine, plan, choice, num_sampled)
        if not measured.tasks:
            raise KeyboardInterrupt
        settings = _bench_settings(engine, loading) | {
            "model": readable(Path(model).name),
            "weights": choice.weights if choice else engine.parts.name,
            "prompts": readable(asked.prompts.name) if asked.prompts else "edge-spec's own",
            "max_tokens": asked.max_tokens,
            "own_loop_cost": None if measured.partial else own_loop_cost(engine.parts.model),
        }
        report = document(measured, settings, open_peers, drawn)
    _print_bench(report, json, asked.out)
    if report["settings"]["partial"]:
        raise KeyboardInterrupt


def _bench_settings(engine: Engine, loading: options.AskedOptions) -> dict[str, Any]:
    plan = engine.parts.plan
    assert plan is not None  # it was opened by one
    head = [] if plan.options.head is None else [readable(plan.options.head.name)]
    return {
        "plan": engine.plan,
        "runtime": engine.parts.runtime,
        "drafter": engine.drafting,
        "drafts": [*head, *(each.source.name for each in plan.drafts)],
        "lossless": str(engine.parts.speculation_factory.lossless.promise),
        "policy": engine.parts.speculation.policy.beliefs(),
        "plain_cost": engine.parts.speculation_factory.lossless.plain_cost,
        "threads": loading.threads,
    }


def _measure(
    engine: Engine, plan: BenchPlan, choice: PeerChoice | None, num_sampled: int
) -> tuple[BenchMeasurement, list[Peer], SampledMeasurement | None]:
    """num_sampled: prompts of each category that are then answered as conversations with the model
    are, where that does not take the likeliest tokens, too."""
    from contextlib import ExitStack

    from edge_spec.core.recommended_sampling import sampling_source, sampling_text
    from edge_spec.diagnostics.bench import measuring

    with ProgressBar() as progress, ExitStack() as stack:
        opened: list[Peer] = []
        if choice is not None:
            stop_ids = engine.parts.text.eos_ids
            opened = stack.enter_context(measuring.open_peers(choice, plan, stop_ids, progress))
        others = [side for each in opened for side in each.sides]
        measured = measuring.measure([*measuring.own_sides(engine), *others], plan, progress)
    sampling = engine.chat_sampling()
    if not num_sampled or measured.partial or sampling.greedy:
        return measured, opened, None
    again_plan = plan.first_of_each_category(num_sampled)
    with ProgressBar() as progress:
        again = measuring.measure(measuring.own_sides(engine, sampling), again_plan, progress)
    source = sampling_source(engine.parts.text.sampling, {})
    how = {"sampling": sampling_text(sampling), "source": source, "per_category": num_sampled}
    return measured, opened, measuring.SampledMeasurement(again, how)


def _peer_choice(model: str, loading: options.AskedOptions) -> PeerChoice:
    """Chooses the peers with one GGUF file for all, ourselves included."""
    from edge_spec.core.export import ExportOptions
    from edge_spec.diagnostics.bench.measuring import PeerChoice
    from edge_spec.models.model_plan import ModelPlan
    from edge_spec.models.source import Source
    from edge_spec.scheduler.machine import available_cores

    with ProgressBar() as progress:
        source = Source(model, progress)
        own_file = not source.is_demo and source.at("gguf").is_file()
        quantization = None if own_file else _PEER_WEIGHTS
        gguf = ModelPlan(source, "llamacpp", export=ExportOptions(quantization)).gguf_file(progress)
    weights = gguf.name if own_file else f"{source.name} as {quantization}"
    threads = loading.threads or available_cores()
    return PeerChoice(gguf, weights, threads)


def _remembering(loading: options.AskedOptions) -> list[str]:
    """Names the drafters that would know a prompt's answer from an earlier one."""
    from edge_spec.drafters.factory import traits_of

    named = traits_of(loading.drafter).items()
    found = [name for name, traits in named if traits.remembers]
    return found or ["--remember"] * loading.remember


def _require_forgetful(loading: options.AskedOptions, repeat: int) -> None:
    remembering = _remembering(loading)
    if repeat > 1 and remembering:
        raise UsageError(
            f"{', '.join(remembering)} remembers answers, so repetitions would measure its memory",
            remedy="Add --repeat 1.",
        )


def _print_bench(report: Document, as_json: bool, out: Path | None) -> None:
    from edge_spec.diagnostics.bench.report import page

    shown = page(report)
    print_result(as_json, report, page_lines(shown) if out is None else ())
    if out is not None:
        write_report(out, report, shown)
        print(f"Written to {out}", file=sys.stderr)


_STATUS = {"pass": 0, "ties": 0, "fail": 1, "inconclusive": 3}
_COLORS = {
    **{"pass": "green", "fail": "red", "fault": "red"},
    **{"ok": "", "note": "cyan", "warning": "yellow"},
}
_SHOWN = 8  # differences in a terminal


@options.with_groups
def verify(
    model: options.Model = "smollm2",
    *,
    extent: Extent,
    loading: options.AskedOptions,
    explain: options.Explain = False,
    json: options.Json = False,
) -> None:
    """Check that speculation does not change what the model writes.

    Exit status 1: a text differs that this mode promises to be equal; 3: too few draft tokens were
    accepted or rejected to show anything. Texts that differ at near ties, where the mode allows it,
    are counted and shown as such.
    """
    from edge_spec.diagnostics.lossless_check.prove import document
    from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

    entries = read_prompts(extent.prompts or OWN_PROMPTS)
    proof = _prove(model, loading, entries, extent, explain)
    report = document(proof, loading.device or "default")
    print_result(json, report, proof_lines(report))
    if status := _STATUS[report["verdict"]]:
        raise typer.Exit(status)


def _prove(
    model: str,
    loading: options.AskedOptions,
    prompts: Sequence[Prompt],
    extent: Extent,
    explain: bool,
) -> Proof:
    from edge_spec.diagnostics.lossless_check.prove import prove

    # What is asked here says nothing of what will be asked.
    with (
        open_engine(model, loading, keeps_answers=False, explain=explain) as engine,
        ProgressBar() as progress,
    ):
        return prove(engine, prompts, extent, progress)


def proof_lines(report: Document) -> Iterator[str]:
    from edge_spec.diagnostics.lossless_check.prove import checks, differences, summary

    told = f"{report['model']} on {report['runtime']}, drafter {report['drafter']}"
    yield printable(f"{told}; promised: {report['promise']}")
    verdict = report["verdict"]
    said = "NEAR TIES" if verdict == "ties" else verdict.upper()
    yield from table_lines([(_COLORS.get(verdict, "yellow"), (said, summary(report)))])
    yield ""
    rows = checks(report)
    yield from table_lines(
        (_COLORS.get(mark, "yellow"), (mark, name, said)) for name, mark, said in rows
    )
    found = differences(report)
    if found:
        yield ""
        yield from table_lines(
            (("", _difference(name, each)) for name, each in found[:_SHOWN]),
            ("text", "prompt", "token", "plain", "got", "margin", "tie"),
        )
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more: --json lists all"
    for claim in report["not_exercised"]:
        yield f"not exercised: {claim}"
    yield f"\n{machine_line(report['machine'] | {'versions': report['versions']})}"
    if report["skipped_prompts"]:
        ids = printable(", ".join(report["skipped_prompts"]))
        yield f"Too long for the context, left out: {ids}."


def _difference(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    margin = "" if found["margin"] is None else f"{found['margin']:.4f}"
    plain, got = repr(found["expected"]), repr(found["got"])
    tie = "yes" if found["near_tie"] else "no"
    return name, found["prompt"], str(found["token_index"]), plain, got, margin, tie


_RUN = "With --run"


@dataclass(frozen=True)
class DoctorOptions:
    draft: str | None = option(
        None,
        "A smaller model that is to draft for it, auto, or none.  [default: a pair bundle's own]",
        metavar="MODEL",
    )
    runtime: str = option("auto", "The model's runtime, as it would be opened with.")
    device: str | None = option(None, "Where the model would run.")
    draft_runtime: str = option("auto", "The draft's runtime.")
    draft_device: str | None = option(None, "Where the draft would run.")
    context: int | None = option(None, "Tokens of context, if not the model's own.")
    open_models: bool = option(False, "Open every variant, too.", flag="--open")
    hashes: bool = option(False, "Hash the files of bundles above 1 GB, too.", flag="--hash")
    out: Path | None = option(None, "A directory for report.md and report.json, to be handed on.")
    run: bool = option(
        False,
        "Then open the models there and try everything, each check in a process of its own.",
        _RUN,
        flag="--run",
    )
    soak_s: float = option(60.0, "Seconds of the same requests.", _RUN, least=0)
    source_language: str | None = option(
        None, "Of what a translator of many languages reads.", _RUN, metavar="NAME"
    )
    target_language: str | None = option(
        None, "Of what it writes, such as fra_Latn.", _RUN, metavar="NAME"
    )

    @property
    def places(self) -> LoadOptions:
        """Raises UsageError for options that contradict each other."""
        from edge_spec.models.options import LoadOptions

        return LoadOptions(
            runtime=self.runtime,
            device=self.device,
            draft_runtime=self.draft_runtime,
            draft_device=self.draft_device,
            context_length=self.context,
            source_language=self.source_language,
            target_language=self.target_language,
        )


@options.with_groups
def doctor(
    model: options.Model = "smollm2",
    *,
    asked: DoctorOptions,
    json: options.Json = False,
) -> None:
    """Examine this machine, and whether a model or a pair will work on it, and pay.

    Nothing is fetched, converted or loaded, but with --run. Exit status 1: there is a fault.
    """
    from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
    from edge_spec.diagnostics.doctor.report import document
    from edge_spec.models.source import Source

    if asked.out is not None:
        require_writable(asked.out)
    request = DiagnosisRequest(model, asked.draft, asked.open_models, asked.hashes, asked.places)
    with ProgressBar() as progress:
        if asked.run:
            _ = Source(model, progress).path  # fetches it
        report = diagnose(request, progress)
        _write(report, model, asked)
        is_whole = not asked.run or _run(report, model, asked, progress)
    print_result(json, document(report), _finding_lines(report))
    if not is_whole:
        raise KeyboardInterrupt
    if report.verdict == "faults":
        raise typer.Exit(1)


def _run(report: Report, model: str, asked: DoctorOptions, progress: Progress) -> bool:
    """Adds what the checks of the device find, and returns whether all were made: Ctrl-C leaves
    what is there."""
    from edge_spec.diagnostics.device_check import DeviceCheckRequest, run_checks
    from edge_spec.diagnostics.doctor.chosen import Chosen
    from edge_spec.diagnostics.doctor.report import files_sha256, note

    chosen: Chosen | None = report.chosen
    if chosen is None:
        report.add("run", [note("run", "nothing was tried: the models would not be opened")])
        return True
    for opening in chosen.openings:
        report.numbers.setdefault(opening.role, {})["sha256"] = files_sha256(opening.plan.source)
    request = DeviceCheckRequest.of(chosen, asked.places, asked.soak_s)
    request.prepare(progress)

    def add(findings: Sequence[Finding]) -> None:
        report.findings += findings
        _write(report, model, asked)

    try:
        run_checks(request, progress, add)
    except KeyboardInterrupt:
        add([note("run", "interrupted: further checks were not reached").of("run")])
        return False
    return True


def _write(report: Report, model: str, asked: DoctorOptions) -> None:
    """Writes the report after each check, so that one that takes the machine down leaves what was
    found before."""
    from edge_spec.diagnostics.doctor.report import page, public_document

    if asked.out is not None:
        found = public_document(report, [each for each in (model, asked.draft) if each])
        write_report(asked.out, found, page(found))


def _finding_lines(report: Report) -> Iterator[str]:
    between = "\n-> " if sys.stdout.isatty() else " -> "
    rows: list[tuple[str, tuple[str, ...]]] = []
    for group, findings in report.grouped.items():
        rows.append(("bold", (group, "", "")))
        for each in findings:
            told = between.join(
                " ".join(part.split()) for part in (each.found, each.remedy) if part
            )
            level = str(each.level)
            rows.append((_COLORS[level], (f"  {level}", each.check, told)))
    yield from table_lines(rows)
    levels = [str(finding.level) for finding in report.findings]
    counts = {level: levels.count(level) for level in ("fault", "warning", "note")}
    found = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())
    yield f"{found}{_summary(report)}"


def _summary(report: Report) -> str:
    """Will it work, will it pay; "" where only the machine was examined."""
    if "target" not in report.numbers:
        return ""
    if report.verdict == "faults":
        return ": it will not work like this"
    speedup = report.numbers.get("speedup", {})
    expected = speedup.get("use") or speedup.get("plan")
    if expected is None:
        return ": it works; whether it pays is not measured"
    if expected > 1:
        return f": it works, and speculation pays ({expected:.2f} times)"
    return ": it works; speculation does not pay, so steps stay plain"
