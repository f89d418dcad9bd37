"""Medusa-1 heads as FasterDecoding publishes them, once their weights are safetensors, and heads
that share one output matrix over a part of the vocabulary: `lm_head.weight` and `d2t`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_spec.core.heads import HeadMatrix, MedusaHead
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.heads.head_files import HeadFiles
from edge_spec.exporters.heads.scored_tokens import scored_tokens
from edge_spec.exporters.stored_tensor import StoredTensor

# Head, then residual block, or the output matrix after the last one.
_BLOCK = re.compile(r"(\d{1,2})\.(\d{1,2})\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d{1,2})\.(\d{1,2})\.weight")
_SHARED, _TOKENS = "lm_head.weight", "d2t"
_ROWS_AT_ONCE = 16384


def medusa_head(files: HeadFiles) -> MedusaHead:
    """Counts heads and blocks by the tensors: published code ignores what config.json says of it.
    Raises as `open_head` does."""
    path, tensors, target = files.path, files.tensors, files.target
    is_sharing = _SHARED in tensors
    for name in tensors:
        is_output = name in (_SHARED, _TOKENS) if is_sharing else _OUTPUT.fullmatch(name)
        if not (_BLOCK.fullmatch(name) or is_output):
            raise UnsupportedModelError(
                f"{path} has a tensor {name[:200]}, which no Medusa head has",
                remedy="Use a head of a kind that docs/drafters.md lists.",
            )
    if is_sharing:
        return _sharing_head(files)
    outputs = [match for match in map(_OUTPUT.fullmatch, tensors) if match]
    if not outputs:
        raise ModelFileError(f"{path}: tensor 0.1.weight is missing", remedy=_AGAIN)
    num_heads = 1 + max(int(match[1]) for match in outputs)
    num_blocks = max(int(match[2]) for match in outputs)
    hidden, vocab = target.hidden_size, target.vocab_size
    shapes = _block_shapes(num_heads, num_blocks, hidden)
    for head in range(num_heads):
        shapes[f"{head}.{num_blocks}.weight"] = (vocab, hidden)
    _require_shapes(path, tensors, shapes)
    if not files.has_weights:
        return MedusaHead(path, hidden, vocab, num_heads, (), ())
    stored = [tensors[f"{head}.{num_blocks}.weight"] for head in range(num_heads)]
    return MedusaHead(
        path=path,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=num_heads,
        blocks=_blocks(tensors, num_heads, num_blocks),
        outputs=tuple(map(_output, stored)),
    )


def _sharing_head(files: HeadFiles) -> MedusaHead:
    path, tensors, target = files.path, files.tensors, files.target
    found = [match for match in map(_BLOCK.fullmatch, tensors) if match]
    if not found or _TOKENS not in tensors:
        missing = _TOKENS if found else "0.0.linear.weight"
        raise ModelFileError(f"{path}: tensor {missing} is missing", remedy=_AGAIN)
    num_heads = 1 + max(int(match[1]) for match in found)
    num_blocks = 1 + max(int(match[2]) for match in found)
    hidden, vocab = target.hidden_size, target.vocab_size
    token_ids = scored_tokens(path, tensors[_TOKENS], vocab)
    shapes = _block_shapes(num_heads, num_blocks, hidden)
    shapes |= {_SHARED: (len(token_ids), hidden), _TOKENS: (len(token_ids),)}
    _require_shapes(path, tensors, shapes)
    if not files.has_weights:
        return MedusaHead(path, hidden, vocab, num_heads, (), (), token_ids)
    blocks = _blocks(tensors, num_heads, num_blocks)
    outputs = (_output(tensors[_SHARED]),)
    return MedusaHead(path, hidden, vocab, num_heads, blocks, outputs, token_ids)


def _block_shapes(num_heads: int, num_blocks: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{block}.linear.bias"] = (hidden,)
    return shapes


def _blocks(
    tensors: Mapping[str, StoredTensor], num_heads: int, num_blocks: int
) -> tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]:
    return tuple(
        tuple(
            (
                tensors[f"{head}.{block}.linear.weight"].float32(),
                tensors[f"{head}.{block}.linear.bias"].float32(),
            )
            for block in range(num_blocks)
        )
        for head in range(num_heads)
    )


def _output(stored: StoredTensor) -> HeadMatrix:
    """Read in parts: float32 of a whole one may take gigabytes."""
    starts = range(0, stored.shape[0], _ROWS_AT_ONCE)
    parts = [stored.rows(slice(start, start + _ROWS_AT_ONCE)) for start in starts]
    return HeadMatrix(tuple(part.float32 for part in parts), is_output=True)


_AGAIN = "Download the head again."


def _require_shapes(
    path: Path, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name in [*shapes, *tensors]:
        if name not in shapes:
            raise UnsupportedModelError(
                f"{path} has a tensor {name}, but its heads end before it", remedy=_AGAIN
            )
        if name not in tensors:
            raise ModelFileError(f"{path}: tensor {name} is missing", remedy=_AGAIN)
        if tensors[name].shape != shapes[name]:
            raise UsageError(
                f"{path} is a head for another target: tensor {name} has the shape "
                f"{list(tensors[name].shape)}, this target needs {list(shapes[name])}",
                remedy="Use the head with the model that it was trained for.",
            )
