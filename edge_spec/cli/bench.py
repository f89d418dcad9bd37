"""`edge-spec bench [MODEL]`: what drafting gains on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json, require_writable
from edge_spec.errors import UsageError, readable
from edge_spec.models.asked_options import Option

if TYPE_CHECKING:
    from edge_spec.diagnostics.bench.measuring import (
        BenchMeasurement,
        BenchPlan,
        SampledMeasurement,
    )
    from edge_spec.diagnostics.bench.peers import OpenPeer, PeerChoice
    from edge_spec.diagnostics.bench.speedup_report import Document
    from edge_spec.engine.engine import Engine

_PEER_WEIGHTS = "Q4_0"  # what all other libraries that read GGUF files read


@dataclass(frozen=True)
class BenchOptions:
    """Declares what is answered how often, and what is measured beside it."""

    prompts: Annotated[
        Path | None,
        Option("JSON lines with id, category, and prompt or turns; without it, ours.", None),
    ] = None
    max_tokens: Annotated[int, Option("Most tokens of an answer.", None, least=1)] = 128
    repeat: Annotated[int, Option("How often each prompt is answered.", None, least=1)] = 3
    per_category: Annotated[int | None, Option("Most prompts of a category.", None, least=1)] = None
    sampled: Annotated[
        int,
        Option(
            "Prompts of a category that are answered as the model's makers sample, too; 0: none.",
            None,
            least=0,
        ),
    ] = 2
    out: Annotated[
        Path | None,
        Option("A directory for report.md and report.json.", None),
    ] = None
    peers: Annotated[
        bool, Option("Measure llama-cpp-python and llama-server, too.", None, flag="--peers")
    ] = False


@options.with_groups
def bench(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    *,
    asked: BenchOptions,
    loading: options.AskedOptions,
    json: options.Json = False,
) -> None:
    """Measure drafting against plain decoding, in turns, by kind of text."""
    from edge_spec.cli.opening import open_engine
    from edge_spec.diagnostics.bench.measuring import make_plan
    from edge_spec.diagnostics.bench.speedup_report import document
    from edge_spec.placement.comparison import own_loop_cost
    from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

    entries = read_prompts(asked.prompts or OWN_PROMPTS, asked.per_category)
    _require_forgetful(loading, asked.repeat)
    if asked.out is not None:
        require_writable(asked.out)
    choice = _peer_choice(model, loading) if asked.peers else None
    opened = str(choice.gguf) if choice else model
    with open_engine(opened, loading) as engine:
        plan = make_plan(engine, entries, asked.max_tokens, asked.repeat)
        measured, open_peers = _measure(engine, plan, choice)
        if not measured.tasks:
            raise KeyboardInterrupt
        drawn = None
        if asked.sampled and not (measured.partial or _remembering(loading)):
            drawn = _measure_sampled(engine, plan, asked.sampled)
        settings = _settings(engine, opened, loading) | {
            "model": readable(Path(model).name),
            "weights": choice.weights if choice else engine.parts.name,
            "prompts": readable(asked.prompts.name) if asked.prompts else "edge-spec's own",
            "max_tokens": asked.max_tokens,
            "own_loop_cost": None if measured.partial else own_loop_cost(engine.parts.model),
        }
        report = document(measured, settings, open_peers, drawn)
    _print(report, json, asked.out)
    if report["settings"]["partial"]:
        raise KeyboardInterrupt


def _settings(engine: Engine, opened: str, loading: options.AskedOptions) -> dict[str, Any]:
    from edge_spec.loader.place import asked_drafts, trained_options
    from edge_spec.models.source import Source

    drafts = list(loading.draft or [])
    if drafts in ([], ["auto"]):  # told by its name, not by its path
        source = Source(opened, lambda what, fraction: None)
        chosen = asked_drafts(source, trained_options(source, loading) or loading)
        drafts = [Source(draft, source.progress).name for draft in chosen]
    return {
        "runtime": engine.parts.runtime,
        "drafter": loading.drafter,
        "drafts": drafts,
        "lossless": str(engine.parts.speculation_factory.lossless.promise),
        "policy": engine.parts.speculation.policy.beliefs(),
        "plain_cost": engine.parts.speculation_factory.lossless.plain_cost,
        "threads": loading.threads,
    }


def _measure(
    engine: Engine, plan: BenchPlan, choice: PeerChoice | None
) -> tuple[BenchMeasurement, list[OpenPeer]]:
    from contextlib import ExitStack

    from edge_spec.diagnostics.bench.measuring import DRAFTING, PLAIN, EngineSide, Side, measure
    from edge_spec.diagnostics.bench.peers import open_peers

    stop_ids = engine.parts.text.eos_ids
    with ProgressBar() as progress, ExitStack() as stack:
        opened: list[OpenPeer] = []
        if choice is not None:
            opened = stack.enter_context(open_peers(choice, plan, stop_ids, progress))
        sides: list[Side] = [EngineSide(engine, DRAFTING), EngineSide(engine, PLAIN)]
        sides += [side for each in opened for side in each.sides]
        return measure(sides, plan, progress), opened


def _measure_sampled(engine: Engine, plan: BenchPlan, count: int) -> SampledMeasurement | None:
    """Answers `count` prompts of each category as conversations with the model are answered;
    returns None where that takes the likeliest tokens, too."""
    from edge_spec.core.recommended_sampling import sampling_source, sampling_text
    from edge_spec.diagnostics.bench.measuring import (
        DRAFTING,
        PLAIN,
        EngineSide,
        SampledMeasurement,
        measure,
    )

    sampling = engine.chat_sampling()
    if sampling.greedy:
        return None
    sides = [EngineSide(engine, name, sampling) for name in (DRAFTING, PLAIN)]
    with ProgressBar() as progress:
        measured = measure(sides, plan.first_of_each_category(count), progress)
    source = sampling_source(engine.parts.text.sampling, {})
    return SampledMeasurement(measured, count, sampling_text(sampling), source)


def _peer_choice(model: str, loading: options.AskedOptions) -> PeerChoice:
    """Chooses the peers with one GGUF file for all, ourselves included."""
    from edge_spec.core.export import ExportOptions
    from edge_spec.diagnostics.bench.peers import PeerChoice
    from edge_spec.models.resolve import StoredModel, gguf_file
    from edge_spec.models.source import Source
    from edge_spec.placement.machine import available_cores

    with ProgressBar() as progress:
        source = Source(model, progress)
        own_file = not source.is_demo and source.at("gguf").is_file()
        quantization = None if own_file else _PEER_WEIGHTS
        stored = StoredModel(source, "gguf", ExportOptions(quantization))
        gguf = gguf_file(stored, progress)
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


def _print(report: Document, as_json: bool, out: Path | None) -> None:
    from edge_spec.diagnostics.bench.speedup_report import markdown
    from edge_spec.diagnostics.report_files import write_report

    if as_json:
        print_json(report)
    elif out is None:
        print(markdown(report), end="")
    if out is None:
        return
    write_report(out, report, markdown(report))
    print(f"Written to {out}", file=sys.stderr)
