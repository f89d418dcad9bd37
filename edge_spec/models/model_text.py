"""Makes what reads and writes a model's text: tokenizer, chat template and end tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.recommended_sampling import recommended_sampling
from edge_spec.core.runtime_protocols import TokenizingRuntime
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.models.bundle import TOKENIZER, Bundle
from edge_spec.models.kept_tokenizer import MAX_TOKENIZER_BYTES, kept_tokenizer_json
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.source_text import SourceEnd
from edge_spec.text.tokenizer import Tokenizer


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
    return ChatFormat(
        tokenizer=Tokenizer(
            json,
            manifest.bos_id if manifest.adds_bos else None,
            source_end(bundle.config, manifest.eos_ids),
        ),
        chat_template=manifest.chat_template,
        eos_ids=manifest.eos_ids,
        bos_id=manifest.bos_id,
        sampling=recommended_sampling(manifest.sampling),
    )


def source_end(config: ModelConfig, eos_ids: Sequence[int]) -> SourceEnd | None:
    """Returns what stands between a source and its answer; None where a model has no encoder."""
    encoder = config.encoder
    if encoder is None:
        return None
    return SourceEnd((*eos_ids[:1], *encoder.beginning), encoder.start_id)


def text_of_info(published: ModelInfo, runtime: Runtime, keeps: bool = False) -> ChatFormat:
    """keeps: in the cache, a tokenizer that takes long to make.

    Raises UnsupportedModelError where neither we nor the runtime can have its tokenizer.
    """
    try:
        json = kept_tokenizer_json(published) if keeps else published.tokenizer_json()
        tokenizer: TextCodec = Tokenizer(
            json,
            published.bos_id if published.adds_bos else None,
            source_end(published.config, published.eos_ids),
        )
    except UnsupportedModelError:
        if not isinstance(runtime, TokenizingRuntime):
            raise
        tokenizer = runtime.open_tokenizer(published)
    return ChatFormat(
        tokenizer=tokenizer,
        chat_template=published.chat_template,
        eos_ids=published.eos_ids,
        bos_id=published.bos_id,
        sampling=published.sampling,
    )
