"""Build a model's tokenizer, chat template and end tokens.

Tokenizers built from metadata are cached, because one of 262,144 tokens takes seconds. They are
named by a digest of their input (`ModelInfo.tokenizer_digest`), so another model's, version's or
library's is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.recommended_sampling import recommended_sampling
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.models.bundle import MANIFEST, TOKENIZER, Bundle, Manifest
from edge_spec.models.kept import KeptDirectory
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.measurements import tell_unkept
from edge_spec.text.chat_format import ChatFormat, with_every_end
from edge_spec.text.tokenizer import SourceEnd, Tokenizer

MAX_TOKENIZER_BYTES = 100_000_000  # several times any real one's
_FIELDS = (  # copied from a model's description
    *("chat_template", "named_templates", "special_tokens", "sampling"),
    *("eos_ids", "bos_id", "end_sources"),
)


def text_of_bundle(bundle: Bundle) -> ChatFormat:
    """Build a bundle's text side. Raises ModelFileError for an unreadable or huge tokenizer."""
    manifest = bundle.manifest
    json = _read_tokenizer(bundle.file(TOKENIZER))
    return text_with(
        _tokenizer(json, manifest, bundle.config),
        manifest,
        bundle.config.vocab_size,
        sampling=recommended_sampling(manifest.sampling),
        end_sources=dict.fromkeys(manifest.eos_ids, MANIFEST),
    )


def _read_tokenizer(file: Path) -> str:
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelFileError(
            f"{file} is larger than {MAX_TOKENIZER_BYTES // 10**6} MB",
            remedy="Do not use this model.",
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(f"{file} is no text", remedy="Export the model again.") from None


def source_end(config: ModelConfig, eos_ids: Sequence[int]) -> SourceEnd | None:
    """Return what separates a source from its answer; None without an encoder."""
    encoder = config.encoder
    if encoder is None:
        return None
    return SourceEnd((*eos_ids[:1], *encoder.beginning), encoder.start_id)


def _tokenizer(json: str, stated: Manifest | ModelInfo, config: ModelConfig) -> Tokenizer:
    bos_id = stated.bos_id if stated.adds_bos else None
    return Tokenizer(json, bos_id, source_end(config, stated.eos_ids), config.vocab_size)


def text_of_info(published: ModelInfo, runtime: Runtime, keeps: bool = False) -> ChatFormat:
    """Build a model file's text side. keeps: cache a tokenizer that is slow to build. Raises
    UnsupportedModelError if neither we nor the runtime can read the tokenizer."""
    try:
        json = kept_tokenizer_json(published) if keeps else published.tokenizer_json()
        tokenizer: TextCodec = _tokenizer(json, published, published.config)
    except UnsupportedModelError:
        own = runtime.open_tokenizer(published)
        if own is None:
            raise
        tokenizer = own
    return text_with(tokenizer, published, published.config.vocab_size)


def text_with(tokenizer: TextCodec, published: Any, vocab_size: int, **own: Any) -> ChatFormat:
    """Combine a tokenizer with a description of its text. published: a `ModelInfo`, or its fields
    of text except `own`."""
    said = {name: getattr(published, name) for name in _FIELDS if name not in own}
    return with_every_end(ChatFormat(tokenizer=tokenizer, **said, **own), vocab_size)


def kept_tokenizer_json(published: ModelInfo) -> str:
    """Return `published.tokenizer_json()` through the cache. Raises as that does; an unwritable
    cache costs only time."""
    digest = published.tokenizer_digest
    if digest is None:
        return published.tokenizer_json()
    folder = cache_directory() / "tokenizers" / digest

    def fill(work: Path) -> None:
        (work / TOKENIZER).write_text(published.tokenizer_json(), encoding="utf-8")

    try:
        return _read_tokenizer(KeptDirectory(folder, {"digest": digest}).get(fill) / TOKENIZER)
    except (ModelFileError, OSError) as error:
        tell_unkept(folder, error)
        return published.tokenizer_json()
