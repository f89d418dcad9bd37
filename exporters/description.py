"""Writes what a bundle says of itself, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from edge_spec.core.config import ModelConfig
from edge_spec.errors import readable
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.parity import Parity
from edge_spec.models.bundle import TOKENIZER, Bundle, open_bundle, write_manifest
from edge_spec.storage.atomic import sha256_file


def describe(
    work: Path,
    checkpoint: StoredCheckpoint,
    config: ModelConfig,
    *,
    format: str,
    quantization: str,
    check: Callable[[Bundle], Parity] | None,
    kv_cache: Literal["shared", "whole"] = "shared",
) -> None:
    """Writes tokenizer and manifest beside a converted model, once more with what `check` finds of
    the bundle. Raises what `check` raises."""
    (work / TOKENIZER).write_text(checkpoint.tokenizer_json(), encoding="utf-8")
    path = checkpoint.path
    described: dict[str, Any] = {
        "format": format,
        "name": readable(path.stem if path.is_file() else path.name),
        "architecture": config.to_dict(),
        "chat_template": checkpoint.chat_template,
        "eos_ids": checkpoint.eos_ids,
        "bos_id": checkpoint.bos_id,
        "adds_bos": checkpoint.adds_bos,
        "sampling": checkpoint.sampling.stated,
        "named_templates": checkpoint.named_templates,
        "special_tokens": checkpoint.special_tokens,
        "quantization": quantization,
        "kv_cache": kv_cache,
        "source_sha256": sha256_file(path) if path.is_file() else None,
        "parity": {},
    }
    manifest = write_manifest(work, **described)
    if check is not None:
        described["parity"] = check(open_bundle(work))._asdict()
        write_manifest(work, manifest.files, **described)
