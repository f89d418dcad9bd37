"""`edge-spec learn status|forget [MODEL]`: what is kept of answers here, and an end to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import print_json
from edge_spec.errors import UsageError

learn = typer.Typer(
    name="learn", help="What --learn and --remember keep of answers.", no_args_is_help=True
)

_Model = Annotated[
    str | None, typer.Argument(help="The model that answers are of.  [default: all models]")
]


@learn.command()
def status(model: _Model = None, json: options.Json = False) -> None:
    """Say what is kept of answers, what was learnt, and whether it drafts."""
    from edge_spec.distill.learnt_folder import document

    learnt, remembered = _kept(model)
    found = [document(path) for path in learnt]
    files: list[dict[str, Any]] = [
        {"model": _model_of(path), "path": str(path), "bytes": path.stat().st_size}
        for path in remembered
    ]
    if json:
        print_json({"models": found, "remembered": files})
        return
    if not (found or files):
        print("Nothing is kept of answers.")
    for each in files:
        size = each["bytes"] / 1e6
        print(f"{each['model']}: {size:.1f} MB of answers that draft others, in {each['path']}")
    for each in found:
        for line in _told(each):
            print(line)


@learn.command()
def forget(model: _Model = None, json: options.Json = False) -> None:
    """Remove answers that were kept, and all that was learnt from them."""
    from edge_spec.distill import learnt_folder
    from edge_spec.drafters.lookup import answers

    learnt, remembered = _kept(model)
    freed = {path.name: learnt_folder.forget(path) for path in learnt}
    freed |= {path.name: answers.forget(path) for path in remembered}
    if json:
        print_json({"freed_bytes": freed})
        return
    total = sum(freed.values()) / 1e6
    print(f"Forgotten: {len(freed)} of {len(freed)} models, {total:.1f} MB.")


def _kept(model: str | None) -> tuple[list[Path], list[Path]]:
    """Returns folders of --learn and files of --remember, of this model, by its name or that of the
    folder or file; of all where None. Raises UsageError where there is nothing of a model that was
    named."""
    from edge_spec.distill.learnt_folder import kept_folders
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
    """Returns the name of the model, after which a digest follows."""
    return path.name.rpartition("-")[0]


def _told(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines about one model's folder."""
    yield (
        f"{found['model']}: {found['answers']} answers, {found['answer_tokens']} tokens, "
        f"{found['bytes'] / 1e6:.1f} MB in {found['path']}"
    )
    if not found["learnt_tokens"]:
        yield "  no head has been trained yet"
        return
    verb = "drafts" if found["drafts"] else "does not draft"
    yield (
        f"  the head {verb}: it has learnt from {found['learnt_tokens']} tokens, and on others it "
        f"is forecast to be {found['gain']:.2f} times as fast as plain decoding"
    )
