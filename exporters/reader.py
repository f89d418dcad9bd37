"""Open a published model: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf_model_info import open_gguf
from edge_spec.exporters.gguf_reader import no_model
from edge_spec.exporters.heads.reader import is_head_alone
from edge_spec.exporters.hf_source import open_directory


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Open a `.gguf` file or a directory with config.json and safetensors.

    Raises ModelFileError if the path is missing, damaged or neither, UsageError for a trained head.
    """
    if not path.exists():
        raise ModelFileError(f"no such file or directory: {path}", remedy="Check the path.")
    if path.is_dir():
        try:
            return open_directory(path)
        except (ModelFileError, UnsupportedModelError):
            if not is_head_alone(path):
                raise
        raise no_model(path)
    if is_head_alone(path):
        raise no_model(path)
    return open_gguf(path)
