"""`edge-spec distill`, `learn` and `tune-skip`: train or search for drafters on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_result
from edge_spec.distill.request import DistillRequest
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine
    from edge_spec.placement.layer_selection import ChosenPart


def distill(
    model: options.NamedModel,
    *,
    request: DistillRequest,
    loading: options.AskedOptions,
    json: options.Json = False,
) -> None:
    """Train a drafter on what the model itself writes.

    Ended early, the same command goes on where it stopped.
    """
    from edge_spec.distill.run import distill

    with ProgressBar() as progress:
        found = distill(model, loading, request, progress)
    use = f"use it with --draft {found.path}"
    if request.out is None and found.report["pays"]:
        use = "the model drafts with it from now on; --draft none leaves it out"
    lines = [*_summary(found.report), f"Written to {found.path}: {use}"]
    print_result(json, {"path": str(found.path), **found.report}, lines)


def _summary(report: Mapping[str, Any]) -> list[str]:
    chances = ", ".join(f"{100 * each:.0f} %" for each in report["acceptance"])
    forecast, vocabulary = report["forecast"], report["vocabulary"]
    many = forecast["num_draft_tokens"]
    pays = "" if report["pays"] else ": it does not pay here"
    return [
        f"accepted by position, each after all before it: {chances} "
        f"({report['tokens']['held_out']:,} held-out tokens)",
        f"scores {vocabulary['scored']:,} tokens, {100 * vocabulary['coverage']:.1f} % of what "
        "the model writes",
        f"forecast: {forecast['speedup']:.2f} times plain decoding, with {many} draft "
        f"token{'s' if many > 1 else ''} a round{pays}",
    ]


learn = typer.Typer(
    name="learn", help="Show or remove what --learn and --remember keep.", no_args_is_help=True
)

_Model = Annotated[
    str | None, typer.Argument(help="The model whose answers are meant.  [default: all models]")
]


@learn.command()
def status(model: _Model = None, json: options.Json = False) -> None:
    """Show what is kept of answers, what was learnt, and whether it drafts."""
    from edge_spec.distill.idle_learning import document

    learnt, remembered = _kept(model)
    found = [document(path) for path in learnt]
    files: list[dict[str, Any]] = [
        {"model": _model_of(path), "path": str(path), "bytes": path.stat().st_size}
        for path in remembered
    ]
    lines = [
        f"{each['model']}: {each['bytes'] / 1e6:.1f} MB of answers that draft others, in "
        f"{each['path']}"
        for each in files
    ]
    lines += map(_learnt_line, found)
    print_result(
        json, {"models": found, "remembered": files}, lines or ["Nothing is kept of answers."]
    )


@learn.command()
def forget(model: _Model = None, json: options.Json = False) -> None:
    """Remove answers that were kept, and all that was learnt from them."""
    from edge_spec.distill.idle_learning import LearntFolder
    from edge_spec.drafters.lookup import answers

    learnt, remembered = _kept(model)
    freed = {path.name: LearntFolder(path).forget() for path in learnt}
    freed |= {path.name: answers.forget(path) for path in remembered}
    models = len({_model_of(path) for path in (*learnt, *remembered)})
    forgotten = f"{models} model{'s' if models != 1 else ''}, {sum(freed.values()) / 1e6:.1f} MB"
    print_result(json, {"freed_bytes": freed}, [f"Forgotten: {forgotten}."])


def _kept(model: str | None) -> tuple[list[Path], list[Path]]:
    """Return folders of --learn and files of --remember, of `model` or of all for None. A model is
    named by its own name or its folder's or file's. Raises UsageError if nothing is kept of it."""
    from edge_spec.distill.idle_learning import kept_folders
    from edge_spec.drafters.lookup import answers

    kept = [kept_folders(), answers.kept_files()]
    learnt, remembered = (
        [path for path in paths if model in (None, _model_of(path), path.stem)] for paths in kept
    )
    if model is not None and not (learnt or remembered):
        names = ", ".join(sorted({_model_of(path) for paths in kept for path in paths}))
        raise UsageError(
            f"nothing was learnt from answers of {model}",
            remedy=f"What is kept: {names or 'nothing'}.",
        )
    return learnt, remembered


def _model_of(path: Path) -> str:
    return path.name.rpartition("-")[0]


def _learnt_line(found: Mapping[str, Any]) -> str:
    head = "no head has been trained yet"
    if found["learnt_tokens"]:
        verb = "drafts" if found["drafts"] else "does not draft"
        head = (
            f"the head {verb}: it has learnt from {found['learnt_tokens']} tokens, and on others "
            f"it is forecast to be {found['gain']:.2f} times as fast as plain decoding"
        )
    return (
        f"{found['model']}: {found['answers']} answers, {found['answer_tokens']} tokens, "
        f"{found['bytes'] / 1e6:.1f} MB in {found['path']}; {head}"
    )


_PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that removes duplicates from a list and explain it.",
    "List five things to check before buying a used bicycle.",
)
_TOKENS = 128  # per answer


def tune_skip(
    model: options.NamedModel,
    json: options.Json = False,
) -> None:
    """Find the layers to leave out when a model drafts for itself.

    They are kept in the bundle, where --drafter early-exit and layer-skip find them.
    """
    from edge_spec.loader import load_engine
    from edge_spec.models.bundle import Bundle, is_in_pair
    from edge_spec.models.model_plan import prepare_model
    from edge_spec.models.options import LoadOptions
    from edge_spec.models.source import Source
    from edge_spec.placement.layer_selection import save_parts

    plain = LoadOptions(runtime="ort", drafter="none")
    bar = ProgressBar()
    source = Source(model, bar)
    if not source.is_demo and is_in_pair(source.path):
        raise UsageError(
            f"{model} is part of a pair bundle, whose files stay as they were written",
            remedy="Tune the model that it was made from.",
        )
    with bar as progress, load_engine(model, plain, progress) as engine:
        bundle = prepare_model(source, "ort", progress, plain.runtime_options).source
        if not isinstance(bundle, Bundle):
            raise UsageError(f"{model} is no bundle", remedy="Convert it with edge-spec export.")
        parts = _best_parts(engine, progress)
    save_parts(bundle, parts)
    lines = [*(f"{name}: {part}" for name, part in parts.items()), f"kept in {bundle.path}"]
    print_result(json, {name: asdict(part) for name, part in parts.items()}, lines)


def _best_parts(engine: Engine, progress: Progress) -> dict[str, ChosenPart]:
    from edge_spec.placement.layer_selection import Judge, best_exit, best_nested
    from edge_spec.scheduler.cost import RowCosts
    from edge_spec.scheduler.measure import median_seconds, quick_passes

    texts = []
    for i, prompt in enumerate(_PROMPTS):
        progress("Writing texts to judge by", i / len(_PROMPTS))
        answer = engine.chat(prompt, max_tokens=_TOKENS)
        texts.append(engine.chat_prompt(prompt) + [token.id for token in answer.tokens])
    loaded = engine.parts.model
    costs = RowCosts(median_seconds(quick_passes(loaded)))
    with Judge(loaded, texts, costs) as judge:
        return {"early-exit": best_exit(judge), "layer-skip": best_nested(judge)}
