"""`edge-spec devices`, `plan`, `bench`, `verify` and `doctor`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.options import open_engine
from edge_spec.cli.output import ProgressBar, page_lines, print_result, table_lines
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.errors import UsageError, readable
from edge_spec.models.asked_options import ENDPOINT, RPC_HELP, AskedOptions, option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edge_spec.core.model import Progress
    from edge_spec.diagnostics.bench.measuring import (
        BenchMeasurement,
        BenchPlan,
        Peer,
        SampledMeasurement,
    )
    from edge_spec.diagnostics.doctor.report import Report
    from edge_spec.engine.engine import Engine
    from edge_spec.models.devices import Device
    from edge_spec.placement.plan import Placement, Plan


def devices(
    rpc: Annotated[list[str] | None, typer.Option(help=RPC_HELP, metavar=ENDPOINT)] = None,
    json: options.Json = False,
) -> None:
    """List the devices that models can run on, and what keeps the others from it."""
    from edge_spec.core.endpoint import Endpoint
    from edge_spec.models.devices import list_devices

    for server in rpc or ():
        Endpoint.parse(server)
    found = list_devices(rpc or ())
    columns = ("runtime", "device", "kind", "memory", "description")
    document = {"devices": [asdict(device) for device in found]}
    print_result(json, document, table_lines(map(_row, found), columns))


def _row(device: Device) -> tuple[str, tuple[str, ...]]:
    said = (device.description, device.kernels, device.fault)
    about = ": ".join(part for part in said if part)
    cells = (device.runtime, device.name or "-", device.kind or "-", _free_memory(device), about)
    return "red" if device.fault else "", cells


def _free_memory(device: Device) -> str:
    from edge_spec.models.devices import format_bytes

    if device.free_bytes is None and device.total_bytes is None:
        return "-"
    free, total = (
        "?" if size is None else format_bytes(size)
        for size in (device.free_bytes, device.total_bytes)
    )
    return f"{free} free of {total}"


def plan(
    model: options.Model = "smollm2",
    draft: Annotated[
        str | None,
        typer.Option(help="A smaller model that may draft for it, auto, or none.", metavar="TEXT"),
    ] = None,
    refresh: Annotated[
        bool, options.switch("--refresh", help="Measure again what was measured before.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure where a model runs best here, and whether a draft pays.

    From then on the model runs where it was fastest, unless options say otherwise.
    """
    from edge_spec.models.bundle import require_readable
    from edge_spec.models.devices import list_devices
    from edge_spec.models.draft_choice import chosen_drafts
    from edge_spec.models.source import Source
    from edge_spec.placement.plan import make_plan
    from edge_spec.scheduler.engine_plan import choose_plan, missing_reader, plans_for

    asked = AskedOptions(draft=draft)
    with ProgressBar() as progress:
        target = Source(model, progress)
        drafts = chosen_drafts(target, asked)
        pair = Source(drafts[0], progress) if drafts else None
        if drafts:
            require_readable(Path(drafts[0]), "the draft of a plan")
        made = make_plan(target, pair, list_devices(), progress, refresh)
    chosen, _ = choose_plan(plans_for(target, asked))
    made = replace(made, in_force=chosen.explain())
    notes = [*made.notes, *filter(None, [missing_reader(target)])]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print_result(json, asdict(made), _plan_lines(made))


def _plan_lines(made: Plan) -> Iterator[str]:
    headings = ("place", "draft", "weights", "plain tokens/s", "memory", "why not")
    rows = list(map(_place_cells, made.placements))
    # Leave out columns with nothing under their heading.
    columns = [column for column in zip(headings, *rows, strict=True) if {*column[1:]} != {"-"}]
    found, *cells = zip(*columns, strict=True)
    yield from table_lines((("", row) for row in cells), found)
    yield ""
    if lossless := made.placements[0].lossless:
        yield f"texts there, with and without drafting: {lossless}"
    yield from made.in_force


def _place_cells(placement: Placement) -> tuple[str, ...]:
    step_s, memory = placement.step_s, placement.memory_bytes
    return (
        str(placement.target),
        "-" if placement.draft is None else str(placement.draft),
        placement.target.weights,
        "-" if step_s is None else f"{1 / step_s:.1f}",
        "-" if memory is None else _memory(memory, placement.on_devices),
        placement.reason or "the best",
    )


def _memory(main: int, on_devices: Mapping[str, int]) -> str:
    from edge_spec.models.devices import format_bytes

    parts = [f"{format_bytes(needed)} on {label}" for label, needed in on_devices.items()]
    return " + ".join([format_bytes(main), *parts])


@dataclass(frozen=True)
class BenchOptions:
    prompts: Path | None = option(
        None, "JSON lines with id, category, and prompt or turns.  [default: edge-spec's own]"
    )
    max_tokens: int = option(128, "Most tokens of an answer.", least=1)
    repeat: int = option(3, "How often each prompt is answered.", least=1)
    per_category: int | None = option(None, "Most prompts of a category.", least=1)
    sampled: int = option(
        2,
        "Prompts of a category to answer again, sampled as the model's makers recommend; 0: none.",
        least=0,
    )
    peers: bool = option(False, "Measure llama-server, too, on the same GGUF file.", flag="--peers")


def bench(
    model: options.Model = "smollm2",
    *,
    asked: BenchOptions,
    loading: options.AskedOptions,
    explain: options.Explain = False,
    json: options.Json = False,
) -> None:
    """Measure how much faster drafting is, by kind of text."""
    from edge_spec.diagnostics.bench.measuring import make_plan
    from edge_spec.diagnostics.bench.report import document, page
    from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

    entries = read_prompts(asked.prompts or OWN_PROMPTS, asked.per_category)
    remembering = _remembering(loading)
    if asked.repeat > 1 and remembering:
        raise UsageError(
            f"{', '.join(remembering)} remembers answers, so repetitions would measure its memory",
            remedy="Add --repeat 1.",
        )
    gguf = _peers_file(model) if asked.peers else None
    with open_engine(str(gguf or model), loading, explain=explain) as engine:
        plan = make_plan(engine, entries, asked.max_tokens, asked.repeat)
        measured, peer = _measure(engine, plan, gguf, loading.threads)
        if not measured.answered:
            raise KeyboardInterrupt
        drawn = None
        if asked.sampled and not (remembering or measured.partial):
            drawn = _sample(engine, measured, asked.sampled)
        settings = _bench_settings(engine, loading) | {
            "model": readable(Path(model).name),
            "weights": gguf.name if gguf else engine.parts.name,
            "prompts": readable(asked.prompts.name) if asked.prompts else "edge-spec's own",
            "max_tokens": asked.max_tokens,
        }
        report = document(measured, settings, peer, drawn)
    print_result(json, report, page_lines(page(report)))
    if report["settings"]["partial"]:
        raise KeyboardInterrupt


def _bench_settings(engine: Engine, loading: options.AskedOptions) -> dict[str, Any]:
    plan = engine.parts.plan
    assert plan is not None  # open_engine always sets it
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


def _peers_file(model: str) -> Path:
    """Return the GGUF file that all sides read. Raises UsageError for a model in another form."""
    from edge_spec.models.source import Source

    with ProgressBar() as progress:
        path = Source(model, progress).at("gguf")
    if not path.is_file():
        raise UsageError(
            f"--peers is for a GGUF file, which {model} is not",
            remedy="Write one with edge-spec export --format gguf.",
        )
    return path


def _measure(
    engine: Engine, plan: BenchPlan, gguf: Path | None, threads: int | None
) -> tuple[BenchMeasurement, Peer | None]:
    from edge_spec.diagnostics.bench.measuring import measure, open_peer, own_sides
    from edge_spec.scheduler.machine import available_cores

    opening: AbstractContextManager[Peer | None] = nullcontext()
    if gguf is not None:
        opening = open_peer(gguf, gguf.name, threads or available_cores(), plan)
    with ProgressBar() as progress, opening as peer:
        sides = [*own_sides(engine), *(peer.sides if peer else ())]
        return measure(sides, plan, progress), peer


def _sample(
    engine: Engine, greedy: BenchMeasurement, per_category: int
) -> SampledMeasurement | None:
    """Answer the first prompts of each category with the model's recommended chat sampling. Return
    None if that sampling is greedy."""
    from edge_spec.core.recommended_sampling import sampling_source, sampling_text
    from edge_spec.diagnostics.bench.measuring import SampledMeasurement, measure, own_sides
    from edge_spec.diagnostics.bench.report import by_category

    sampling = engine.chat_sampling()
    if sampling.greedy:
        return None
    groups = by_category(greedy.answered).values()
    tasks = [each.task for group in groups for each in group[:per_category]]
    plan = replace(greedy.plan, tasks=tasks)
    with ProgressBar() as progress:
        measured = measure(own_sides(engine, sampling), plan, progress)
    source = sampling_source(engine.parts.text.sampling, {})
    how = {"sampling": sampling_text(sampling), "source": source, "per_category": per_category}
    return SampledMeasurement(measured, how)


def _remembering(loading: options.AskedOptions) -> list[str]:
    """Return the drafters or options that would replay a prompt's earlier answer."""
    from edge_spec.drafters.factory import traits_of

    named = traits_of(loading.drafter).items()
    found = [name for name, traits in named if traits.remembers]
    return found or ["--remember"] * loading.remember


_STATUS = {"pass": 0, "ties": 0, "fail": 1, "inconclusive": 3}


def verify(
    model: options.Model = "smollm2",
    *,
    extent: Extent,
    loading: options.AskedOptions,
    explain: options.Explain = False,
    json: options.Json = False,
) -> None:
    """Check that drafting does not change what the model writes.

    Exit status 1: a text differs that this mode promises to be equal; 3: too few draft tokens were
    accepted or rejected to show anything. Texts that differ at near ties, where the mode allows it,
    are counted and shown as such.
    """
    from edge_spec.diagnostics.lossless_check.prove import document, page, prove
    from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

    entries = read_prompts(extent.prompts or OWN_PROMPTS)
    # Do not keep the answers: these prompts predict nothing about real use.
    with (
        open_engine(model, loading, keeps_answers=False, explain=explain) as engine,
        ProgressBar() as progress,
    ):
        proof = prove(engine, entries, extent, progress)
    report = document(proof, loading.device or "default")
    print_result(json, report, page_lines(page(proof)))
    if status := _STATUS[proof.verdict]:
        raise typer.Exit(status)


@dataclass(frozen=True)
class DoctorOptions:
    hashes: bool = option(False, "Hash the files of bundles above 1 GB, too.", flag="--hash")
    run: bool = option(
        False,
        "Open the models, too, and try everything, each check in a process of its own.",
        flag="--run",
    )


def doctor(
    model: options.Model = "smollm2",
    *,
    asked: DoctorOptions,
    loading: options.AskedOptions,
    json: options.Json = False,
) -> None:
    """Check whether a model, or a model and its draft, will work here.

    Nothing is fetched, converted or loaded without --run. Exit status 1: there is a fault.
    """
    from edge_spec.diagnostics.doctor.diagnose import diagnose
    from edge_spec.diagnostics.doctor.report import document, page
    from edge_spec.models.source import Source

    with ProgressBar() as progress:
        if asked.run:
            _ = Source(model, progress).path  # downloads the model
        report = diagnose(model, loading, progress, hashes=asked.hashes)
        is_whole = not asked.run or _try(report, model, loading, progress)
    print_result(json, document(report), page_lines(page(report)))
    if not is_whole:
        raise KeyboardInterrupt
    if report.verdict == "faults":
        raise typer.Exit(1)


def _try(report: Report, model: str, loading: options.AskedOptions, progress: Progress) -> bool:
    """Add the results of the device checks. Return False if Ctrl-C stopped them early."""
    from edge_spec.diagnostics.doctor.device import DeviceCheck, run_checks
    from edge_spec.diagnostics.doctor.report import note
    from edge_spec.diagnostics.report_files import files_sha256
    from edge_spec.models.bundle import ROLES

    if report.runtime is None:
        told = note("run", "nothing was tried: the models would not be opened")
        report.add("run", "run", [told])
        return True
    for role in ROLES:
        if role in report.examined:
            path = Path(report.examined[role]["path"])
            report.examined[role]["sha256"] = files_sha256(path)
    check = DeviceCheck(model, replace(loading, runtime=report.runtime))
    check.prepare(progress)
    try:
        report.add("run", "run", run_checks(check, progress))
    except KeyboardInterrupt:
        told = note("run", "interrupted: further checks were not reached")
        report.add("run", "run", [told])
        return False
    return True
