"""`edge-spec pull MODEL`: a model of the hub into the cache."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json

if TYPE_CHECKING:
    from edge_spec.models.hub.client import HubReference
    from edge_spec.models.hub.download import HubModel


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="hf:org/name, and after it @revision or :file.gguf.", show_default=False
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(help="Fetch this smaller model, too; auto: one known for the family."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Fetch a model from the Hugging Face hub, and print where it is.

    What is here already is not fetched again; an interrupted download goes on.
    """
    from edge_spec.models.hub.client import HubReference
    from edge_spec.models.hub.download import pull as fetch

    reference = HubReference.parse(model)
    smaller = None if draft in (None, "none") else _draft(reference, draft)
    with ProgressBar() as progress:
        fetched = fetch(reference, progress)
        drafting = None if smaller is None else fetch(smaller, progress)
    if drafting is not None:
        _compare(fetched, drafting)
    if json:
        document = _document(fetched)
        document["draft"] = None if drafting is None else _document(drafting)
        print_json(document)
        return
    for each in (fetched, drafting):
        if each is not None:
            print(each.path)


def _draft(target: HubReference, draft: str) -> HubReference | None:
    from edge_spec.models.hub.client import DRAFTS, HEADS, PREFIX, HubReference, known

    if draft != "auto":
        return HubReference.parse(draft)
    smaller, head = known(DRAFTS, target.repository), known(HEADS, target.repository)
    if smaller is not None and head is not None:
        _note(f"there is a head trained for {target}, too: --draft {PREFIX}{head}")
    found = smaller or head
    if found is None:
        _note(f"no smaller model of the family of {target} is known: name one with --draft")
        return None
    return HubReference.parse(PREFIX + found)


def _compare(target: HubModel, draft: HubModel) -> None:
    """Says so where the draft's tokens are not the target's, or a head is another target's."""
    from edge_spec.errors import EdgeSpecError
    from edge_spec.models import runtimes
    from edge_spec.models.draft_choice import describe
    from edge_spec.text.vocabulary import same_vocabulary

    if runtimes.is_head(draft.path):
        try:
            config = describe(target.path).config
            _note(f"{draft.name}: {runtimes.open_head(draft.path, config, has_weights=False)}")
        except EdgeSpecError as error:
            _note(str(error))
        return
    try:
        same = same_vocabulary(describe(target.path).vocabulary, describe(draft.path).vocabulary)
    except EdgeSpecError as error:
        _note(f"whether {draft.name} has the tokens of {target.name} is not known: {error}")
        return
    if not same:
        _note(
            f"{draft.name} has other tokens than {target.name}: with --draft {draft.reference} its "
            "draft tokens are passed on as text, and --draft auto does not choose it"
        )


def _document(model: HubModel) -> dict[str, Any]:
    from edge_spec.models.hub.download import content_sha256

    files = [
        {"name": name, "num_bytes": path.stat().st_size, "sha256": content_sha256(path)}
        for name, path in model.files.items()
    ]
    return {
        "model": str(model.reference),
        "path": str(model.path),
        "revision": model.commit,
        "files": files,
        "num_bytes": sum(file["num_bytes"] for file in files),
    }


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
