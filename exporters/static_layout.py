"""The layout of graphs whose shapes are fixed, as NPUs and Core ML want them.

A program has one function for each number of rows, all of the same weights.

Inputs, outputs and states (rows: of the function, padding included; slots: of the cache):

    input_ids     [1, rows] int32
    position_ids  [rows] int32              committed tokens + depth in the tree; 0 for padding
    write_slot    [1] int32                 keys and values of row i go to slot write_slot + i
    mask          [1, 1, rows, slots]       0 where a row sees a slot, -30000 elsewhere
    logits        [rows, vocab]             or logits_0, logits_1, ... side by side
    hidden        [rows, hidden_size]       after the final norm: where it was asked for, and of
                                            functions that only prefill
    states        [..., kv_heads, slots, head_dim]

First the keys and values of all rows are written, then each row attends to the slots that its
mask leaves. Where a token stands in the cache is therefore independent of its position in the
text, and an accepted path of a tree can stay where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint

BLOCK_SIZE = 32  # weights that share a scale
_CONTEXT_TOKENS = 2048  # where none is asked for
SCORING_ROWS = (1, 4, 8)
PREFILL_ROWS = 64
MASKED = -30000.0  # what a mask adds where a row does not see a slot


class StaticFunction(NamedTuple):
    """Describes a function of `rows` rows, and whether it scores them."""

    name: str
    rows: int
    scores: bool


def functions(scoring_rows: Sequence[int] = SCORING_ROWS) -> list[StaticFunction]:
    """Returns those of a program: some that score, and one that only fills the cache."""
    scoring = [StaticFunction(f"rows_{rows}", rows, True) for rows in scoring_rows]
    return [*scoring, StaticFunction(f"prefill_{PREFILL_ROWS}", PREFILL_ROWS, False)]


@dataclass(frozen=True)
class StaticShape:
    """Describes the cache: `slots` hold `context_length` tokens and the padding of any pass."""

    context_length: int
    slots: int

    @classmethod
    def of(cls, context_length: int) -> StaticShape:
        needed = context_length + max(SCORING_ROWS) - 1
        return cls(context_length, -(-needed // 64) * 64)


def chosen_context(config: ModelConfig, asked: int | None) -> int:
    """Returns the tokens that a cache is for. Raises UsageError for more than the model has."""
    longest = config.context_length
    chosen = min(_CONTEXT_TOKENS, longest) if asked is None else asked
    if not 1 <= chosen <= longest:
        raise UsageError(f"a context of {chosen} tokens", remedy=f"Choose 1 to {longest}.")
    return chosen


def require_block_size(options: ExportOptions, what: str) -> None:
    """Raises UsageError for another one than all such exports have."""
    if options.block_size not in (None, BLOCK_SIZE):
        raise UsageError(f"block size {options.block_size}", remedy=f"{what} have {BLOCK_SIZE}.")


def require_whole_blocks(checkpoint: StoredCheckpoint, remedy: str) -> None:
    """Raises UnsupportedModelError for matrices whose rows are not whole blocks."""
    config = checkpoint.config
    for size in (config.hidden_size, config.query_size, config.intermediate_size):
        if size % BLOCK_SIZE:
            raise UnsupportedModelError(
                f"{checkpoint.path}: rows of {size} weights are not whole blocks of {BLOCK_SIZE}",
                remedy=remedy,
            )
