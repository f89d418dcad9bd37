"""Refuses GGUF files that hold no model that writes text, by their metadata."""

from __future__ import annotations

from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.gguf_reader import GgufFile

# By general.type (docs/gguf.md of ggml), and by general.architecture where files are older than it.
_OTHER_KINDS = {
    "adapter": ("a LoRA adapter", "Merge it into its model, and give that."),
    "mmproj": ("the part of a model that reads pictures", "Give the file of its text model."),
    "clip": ("the part of a model that reads pictures", "Give the file of its text model."),
    "imatrix": ("an importance matrix", "Give the model that it was measured on."),
}


def require_language_model(file: GgufFile) -> None:
    """Raises UnsupportedModelError for adapters, parts of models, and models that embed text."""
    architecture = file.metadata.get("general.architecture")
    kinds = (file.metadata.get("general.type"), architecture)
    known = (_OTHER_KINDS[kind] for kind in kinds if isinstance(kind, str) and kind in _OTHER_KINDS)
    found = next(known, None)
    if found is None and _embeds(file, architecture):
        found = ("a model that embeds text", "Give a model that writes text.")
    if found is not None:
        what, remedy = found
        raise UnsupportedModelError(f"{file.path} is {what}, not one that writes", remedy=remedy)


def _embeds(file: GgufFile, architecture: object) -> bool:
    """Returns whether tokens see those after them, or the rows of a text are pooled into one."""
    is_causal = file.metadata.get(f"{architecture}.attention.causal")
    pooling = file.metadata.get(f"{architecture}.pooling_type")
    return is_causal is False or (isinstance(pooling, int) and pooling > 0)
