"""A tokenizer in GGUF's terms: carried over from a GGUF file, or derived from a tokenizer.json."""

from __future__ import annotations

import numpy as np
import tokenizers
from gguf.constants import TokenType

from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf.metadata import Metadata
from edge_spec.exporters.gguf.tokenizer_json import NO_SCORE, vocabulary_of
from edge_spec.exporters.gguf_source import STOP_TOKENS, TEMPLATE_TOKENS
from edge_spec.text.chat_format import END_NAMES

_PREFIX = "tokenizer."


def tokenizer_metadata(checkpoint: StoredCheckpoint, stated: Metadata) -> Metadata:
    """The keys `tokenizer.*`, with as many tokens as the model scores.

    stated: the metadata of a GGUF source, whose keys are taken over as they are. Raises
    UnsupportedModelError for a tokenizer.json whose ids llama.cpp would not reproduce.
    """
    if stated:
        metadata = {key: value for key, value in stated.items() if key.startswith(_PREFIX)}
    else:
        metadata = vocabulary_of(checkpoint) | _special_tokens(checkpoint)
    return metadata | _padding(metadata, checkpoint.config.vocab_size)


def _special_tokens(checkpoint: StoredCheckpoint) -> Metadata:
    """Returns what begins and ends a text. Raises UnsupportedModelError for more ends than GGUF
    names, beside those that are found by their own names."""
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json())
    named = _named_tokens(checkpoint, tokenizer)
    main = named.get("eos")  # which chat templates and other programs know as EOS
    stops = sorted(checkpoint.eos_ids, key=lambda stop: (stop != main, stop))
    if len(stops) > len(STOP_TOKENS):
        stops = [
            stop for stop in stops if stop == main or tokenizer.id_to_token(stop) not in END_NAMES
        ]
    if len(stops) > len(STOP_TOKENS):
        raise UnsupportedModelError(
            f"{checkpoint.path} ends texts with any of {len(stops)} tokens, a GGUF file names at "
            f"most {len(STOP_TOKENS)}",
            remedy="Leave the important ones in generation_config.json.",
        )
    metadata: Metadata = {f"tokenizer.ggml.{name}_token_id": id for name, id in named.items()}
    metadata |= {
        f"tokenizer.ggml.{name}_token_id": stop
        for name, stop in zip(STOP_TOKENS, stops, strict=False)
    }
    if checkpoint.bos_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = checkpoint.bos_id
    # Stated also where it is false: llama.cpp's default depends on the kind of vocabulary.
    metadata["tokenizer.ggml.add_bos_token"] = checkpoint.adds_bos and checkpoint.bos_id is not None
    if checkpoint.chat_template is not None:
        metadata["tokenizer.chat_template"] = checkpoint.chat_template
    for name, template in checkpoint.named_templates.items():
        metadata[f"tokenizer.chat_template.{name}"] = template
    if checkpoint.named_templates:
        metadata["tokenizer.chat_templates"] = list(checkpoint.named_templates)
    return metadata


def _named_tokens(checkpoint: StoredCheckpoint, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Returns the tokens that chat templates know by name, by GGUF's names."""
    texts = {key: checkpoint.special_tokens.get(name) for key, name in TEMPLATE_TOKENS.items()}
    ids = {key: tokenizer.token_to_id(text) for key, text in texts.items() if isinstance(text, str)}
    return {key: token for key, token in ids.items() if token is not None}


def _padding(metadata: Metadata, vocab_size: int) -> Metadata:
    """llama.cpp wants a token for each row of the embeddings."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) >= vocab_size:
        return {}
    missing = range(len(tokens), vocab_size)
    padded: Metadata = {"tokenizer.ggml.tokens": tokens + [f"[PAD{at}]" for at in missing]}
    for key, filler in (("token_type", TokenType.UNUSED), ("scores", NO_SCORE)):
        values = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(values, np.ndarray):
            filled = np.full(len(missing), filler, values.dtype)
            padded[f"tokenizer.ggml.{key}"] = np.concatenate([values, filled])
    return padded
