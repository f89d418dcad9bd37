"""Medusa-1 heads as FasterDecoding publishes them, once their weights are safetensors, and heads
that share one output matrix over a part of the vocabulary: `lm_head.weight` and `d2t`."""

from __future__ import annotations

import re
from itertools import chain

from edge_spec.core.heads import HeadMatrix, MedusaHead
from edge_spec.exporters.heads.head_files import (
    HeadFiles,
    Names,
    Shapes,
    require_shapes,
    scored_tokens,
)
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

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
    counted = _BLOCK if is_sharing else _OUTPUT
    found = [match for match in map(counted.fullmatch, tensors) if match]
    if not found or (is_sharing and _TOKENS not in tensors):
        missing = _TOKENS if found else "0.0.linear.weight" if is_sharing else "0.1.weight"
        raise damaged(f"{path}: tensor {missing} is missing")
    num_heads = 1 + max(int(match[1]) for match in found)
    num_blocks = max(int(match[2]) for match in found) + is_sharing
    hidden, vocab, token_ids = target.hidden_size, target.vocab_size, None
    names = [[f"{head}.{b}.linear." for b in range(num_blocks)] for head in range(num_heads)]
    shapes: Shapes = {}
    for name in chain(*names):
        shapes |= {name + "weight": (hidden, hidden), name + "bias": (hidden,)}
    if is_sharing:
        token_ids = scored_tokens(files)
        outputs, num_scored = [_SHARED], vocab if token_ids is None else len(token_ids)
        shapes |= {_SHARED: (num_scored, hidden), _TOKENS: (num_scored,)}
    else:
        outputs = [f"{head}.{num_blocks}.weight" for head in range(num_heads)]
        shapes |= dict.fromkeys(outputs, (vocab, hidden))
    require_shapes(path, Names({}, {}), tensors, shapes)
    if not files.has_weights:
        return MedusaHead(path, hidden, vocab, num_heads, (), (), token_ids)
    blocks = tuple(
        tuple((tensors[b + "weight"].float32(), tensors[b + "bias"].float32()) for b in of_head)
        for of_head in names
    )
    matrices = tuple(_output(tensors[name]) for name in outputs)
    return MedusaHead(path, hidden, vocab, num_heads, blocks, matrices, token_ids)


def _output(stored: StoredTensor) -> HeadMatrix:
    """Read in parts: float32 of a whole one may take gigabytes."""
    starts = range(0, stored.shape[0], _ROWS_AT_ONCE)
    parts = [stored.rows(slice(start, start + _ROWS_AT_ONCE)) for start in starts]
    return HeadMatrix(tuple(part.float32 for part in parts), is_output=True)
