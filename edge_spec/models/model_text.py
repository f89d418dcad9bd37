"""Makes what reads and writes a model's text: tokenizer, chat template and end tokens.

Tokenizers that were made of a model file's metadata are kept in the cache: to make one of 262,144
tokens takes seconds. The first line of such a file is the SHA-256 of the file's own name, without
the ending, and of all that follows: a tokenizer.json. The name is the digest of what the tokenizer
is made of (`DigestedTokenizer`), so that a file of another model, version or library is never
looked at.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import DigestedTokenizer, ModelInfo
from edge_spec.core.recommended_sampling import recommended_sampling
from edge_spec.core.runtime_protocols import TokenizingRuntime
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.models.bundle import MANIFEST, TOKENIZER, Bundle, Manifest
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.measurements import tell_unkept
from edge_spec.text.chat_format import ChatFormat, with_every_end
from edge_spec.text.tokenizer import SourceEnd, Tokenizer

MAX_TOKENIZER_BYTES = 100_000_000  # several times what any has
SUFFIX = ".tokenizer"
_DIGEST_BYTES = 64
_FIELDS = (  # of what a model says of its text
    *("chat_template", "named_templates", "special_tokens", "sampling"),
    *("eos_ids", "bos_id", "end_sources"),
)

_log = logging.getLogger(__name__)


def text_of_bundle(bundle: Bundle) -> ChatFormat:
    """Raises ModelFileError for a tokenizer that cannot be read, or is larger than any is."""
    manifest = bundle.manifest
    file = bundle.file(TOKENIZER)
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelFileError(
            f"{file} is larger than {MAX_TOKENIZER_BYTES // 10**6} MB",
            remedy="Do not use this model.",
        )
    try:
        json = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(f"{file} is no text", remedy="Export the model again.") from None
    return text_with(
        _tokenizer(json, manifest, bundle.config),
        manifest,
        bundle.config.vocab_size,
        sampling=recommended_sampling(manifest.sampling),
        end_sources=dict.fromkeys(manifest.eos_ids, MANIFEST),
    )


def source_end(config: ModelConfig, eos_ids: Sequence[int]) -> SourceEnd | None:
    """Returns what stands between a source and its answer; None where a model has no encoder."""
    encoder = config.encoder
    if encoder is None:
        return None
    return SourceEnd((*eos_ids[:1], *encoder.beginning), encoder.start_id)


def _tokenizer(json: str, stated: Manifest | ModelInfo, config: ModelConfig) -> Tokenizer:
    bos_id = stated.bos_id if stated.adds_bos else None
    return Tokenizer(json, bos_id, source_end(config, stated.eos_ids), config.vocab_size)


def text_of_info(published: ModelInfo, runtime: Runtime, keeps: bool = False) -> ChatFormat:
    """keeps: in the cache, a tokenizer that takes long to make.

    Raises UnsupportedModelError where neither we nor the runtime can have its tokenizer.
    """
    try:
        json = kept_tokenizer_json(published) if keeps else published.tokenizer_json()
        tokenizer: TextCodec = _tokenizer(json, published, published.config)
    except UnsupportedModelError:
        if not isinstance(runtime, TokenizingRuntime):
            raise
        tokenizer = runtime.open_tokenizer(published)
    return text_with(tokenizer, published, published.config.vocab_size)


def text_with(tokenizer: TextCodec, published: Any, vocab_size: int, **own: Any) -> ChatFormat:
    """Returns what a file says of its text, beside its tokenizer. published: a `ModelInfo`, or what
    has its fields of text, but for those that are `own`."""
    said = {name: getattr(published, name) for name in _FIELDS if name not in own}
    return with_every_end(ChatFormat(tokenizer=tokenizer, **said, **own), vocab_size)


def kept_tokenizer_json(published: ModelInfo) -> str:
    """`published.tokenizer_json()`, from the cache where it is there, else kept there from now on.

    Raises as that does; a cache that cannot be written costs only time.
    """
    digest = published.tokenizer_digest if isinstance(published, DigestedTokenizer) else None
    if digest is None:
        return published.tokenizer_json()
    path = cache_directory() / "tokenizers" / f"{digest}{SUFFIX}"
    try:
        return read_kept_tokenizer(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (ModelFileError, OSError) as error:
        _log.warning("%s", error)
    json = published.tokenizer_json()
    _keep(path, json.encode())
    return json


def read_kept_tokenizer(path: Path) -> str:
    """Returns the tokenizer.json. Raises ModelFileError for a damaged file, OSError."""
    with path.open("rb") as file:
        seal = file.readline(_DIGEST_BYTES + 1)
        body = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(body) > MAX_TOKENIZER_BYTES or seal != _seal(path, body):
        raise ModelFileError(
            f"{path} is damaged, the tokenizer is made again",
            remedy="Check the disk it is on if that happens again.",
        )
    return body.decode()


def _keep(path: Path, body: bytes) -> None:
    if len(body) > MAX_TOKENIZER_BYTES:
        return
    try:
        with atomic_file(path) as work, work.open("wb") as file:
            file.write(_seal(path, body))
            file.write(body)
    except OSError as error:
        tell_unkept(path, error)


def _seal(path: Path, body: bytes) -> bytes:
    digest = hashlib.sha256(path.stem.encode() + b"\n")
    digest.update(body)
    return digest.hexdigest().encode() + b"\n"
