"""Trained heads: small networks that draft from what the target computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import LayerKind

# Likeliest tokens of a row that transitions rescore. Rescoring all would read a matrix as long as
# the vocabulary for each draft token.
SHORTLIST = 512


@dataclass(frozen=True, eq=False)
class Transitions:
    """DSpark's Markov head: adds to a logit the product of two rows, the previous token's and the
    scored token's."""

    after: Callable[[np.ndarray], np.ndarray]  # [tokens] int of the target -> [tokens, rank]
    scored: Callable[[np.ndarray], np.ndarray]  # [tokens] int, as scored -> [tokens, rank]

    def scoring(self, token_ids: np.ndarray) -> Transitions:
        """Restrict scoring to these tokens: [tokens] int64."""
        rows = self.scored
        return replace(self, scored=lambda places: rows(token_ids[places]))


@dataclass(frozen=True, eq=False)
class Confidence:
    """Estimates acceptance by logistic regression."""

    weight: np.ndarray  # [hidden_size (+ rank)]: state and previous token's row
    bias: float


class AssistantLayer(NamedTuple):
    """How an assistant's layer attends."""

    kind: LayerKind
    source: int  # target layer whose keys and values it reads
    head_dim: int


class Centroids(NamedTuple):
    """Scores only tokens of the clusters whose centroids score highest. ordering: [clusters, tokens
    of each] int64, the target's tokens."""

    weight: np.ndarray  # [clusters, hidden_size] float32
    ordering: np.ndarray
    num_active: int


@dataclass(frozen=True, eq=False)
class AssistantHead:
    """A small model that attends to the target's keys and values instead of its own (Google 2026,
    the assistants of Gemma 4). It makes each draft token at the pending token's position, from the
    previous token and the state made with that token.

    tensors: float32, reread at each access if the mapping does so; matrices [out, in]:
        pre.weight             joins the target's embedding of a token and a state of its width
        post.weight            makes the next such state
        norm                   after the last layer
        layers.L.(q|o|gate|up|down).weight
        layers.L.(input_norm|q_norm|attended_norm|mlp_norm|added_norm)
        layers.L.scale         factor of the layer's output
    """

    drafted_by: ClassVar = "assistant"

    path: Path
    config: ModelConfig  # of its layers; vocab_size and context_length are the target's
    target_size: int  # the target's hidden_size
    embedding_scale: float  # factor of the target's embedding
    layers: tuple[AssistantLayer, ...]
    tensors: Mapping[str, np.ndarray]
    # Reads rows of its output matrix, [rows, hidden_size] float32.
    output_rows: Callable[[np.ndarray], np.ndarray] | None = None
    centroids: Centroids | None = None
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all

    def __str__(self) -> str:
        sources = ", ".join(map(str, dict.fromkeys(layer.source for layer in self.layers)))
        told = f"assistant of {len(self.layers)} layers, reads keys and values of layers {sources}"
        return f"{told}, scores {self.num_scored} of {self.config.vocab_size} tokens"

    @property
    def num_scored(self) -> int:
        if self.centroids is not None:
            return self.centroids.num_active * int(self.centroids.ordering.shape[1])
        return self.config.vocab_size if self.token_ids is None else len(self.token_ids)

    def scoring(self, token_ids: np.ndarray) -> AssistantHead:
        """Restrict scoring to these tokens: [tokens] int64."""
        return replace(self, token_ids=token_ids)


class TargetTables(Protocol):
    """The target's tables, which a head may share."""

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Map tokens [rows] int to [rows, hidden_size] float32."""

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        """Return these rows of the output matrix, None: all, [tokens, hidden_size] float32."""


@dataclass(frozen=True, eq=False)
class HeadMatrix:
    """A head's matrix [out, in]. parts: read its rows in order, [rows, in] float32. bias: [out].
    is_output: makes logits."""

    parts: tuple[Callable[[], np.ndarray], ...]
    bias: np.ndarray | None = None
    is_output: bool = False


FLOAT_BITS = 32
WEIGHTS_FILE = "weights.bin"  # as graphs of heads refer to it


@dataclass(frozen=True, eq=False)
class StoredStep:
    """A head's exported step: a serialized graph, and its matrices, as the path of a WEIGHTS_FILE
    or its content."""

    graph: bytes
    weights: Path | bytes


@dataclass(frozen=True, eq=False)
class EntryRows:
    """Input of one pass of an EAGLE head's layers; row i writes cache slot `start + i`."""

    embedded: np.ndarray  # [rows, hidden_size] float32, of tokens
    found: np.ndarray  # [known, features_size] float32: target features of some rows
    states: np.ndarray  # [rows - known, hidden_size] float32: the head's own, for the others
    order: np.ndarray  # [rows] int: each row's index into `found` followed by `states`
    positions: np.ndarray  # [rows] int
    start: int
    sees: np.ndarray | None  # [rows, start + rows] bool, causal; None: all slots up to its own
    scored: np.ndarray  # [scored] int: the rows to score, at least one


# Runs all layers of an EAGLE head on one cache: writes the entries, and returns float32 states to
# continue from, [rows, hidden_size], and logits, [scored, scored tokens].
EagleStep = Callable[[EntryRows], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of independent heads; the likeliest tokens in falling order, with their
    probabilities."""

    logits: np.ndarray  # [heads, scored tokens] float32
    likeliest: np.ndarray  # [heads, some] int64, indices of scored tokens
    shares: np.ndarray  # [heads, some] float32
    states: np.ndarray | None = None  # [heads, hidden_size] before scoring, where requested


# Runs Medusa heads on a state [hidden_size] float32; takes the heads to score, in order.
MedusaStep = Callable[[np.ndarray, Sequence[int]], HeadScores]


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A block that a DFlash head drafts, and the tokens before it to cache, from slot `start`
    on."""

    embedded: np.ndarray  # [block, hidden_size] float32: pending token and masks
    found: np.ndarray  # [known, features_size] float32: target features of those tokens
    position: int  # in the text, of the first of those tokens
    start: int
    num_seen: int  # most entries before the block that it sees, the last ones
    scored: range  # rows of the block


# Runs all layers of a DFlash head on one cache: caches known tokens, scores rows of the block.
BlockStep = Callable[[BlockRows], HeadScores]


@runtime_checkable
class ComputesHeads(Protocol):
    """A runtime that runs heads' steps stored by an exporter."""

    def open_head(self, stored: StoredStep, head: TrainedHead, threads: int | None) -> Any:
        """Return a MedusaStep; for other heads an object whose `bound_to(cache)` returns an
        EagleStep or BlockStep. cache: [layers, 2, kv_heads, slots, head_dim] float32, finite; steps
        write keys and values in place. threads: None: one. Raises ModelFileError."""


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Input for unknown tokens and features, to draft several tokens in one pass (P-EAGLE)."""

    token: int  # in the target's vocabulary
    features: np.ndarray  # [features_size] float32, in place of the target's
    count: int  # tokens scored in one pass, including the pending token's row


@dataclass(frozen=True)
class HeadExperts:
    """Experts and a gated shared MLP in place of MLPs (Qwen Team 2026, Qwen 3.5)."""

    count: int
    used: int  # by each row
    size: int  # width of one expert


@dataclass(frozen=True, eq=False, kw_only=True)
class LayersHead:
    """A head with decoder layers of its own. config: of these, with the target's vocab_size and
    context_length. tensors: float32, reread at each access if the mapping does so; matrices [out,
    in]."""

    path: Path
    config: ModelConfig
    feature_layers: tuple[int, ...]  # ids as in `core.features`
    feature_size: int  # the target's hidden_size
    tensors: Mapping[str, np.ndarray]
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all
    # Reads rows [rows, hidden_size] of its own embedding alone.
    embed_rows: Callable[[np.ndarray], np.ndarray] | None = None
    # Reads rows of its own output matrix, by index of scored token.
    head_rows: Callable[[np.ndarray], np.ndarray] | None = None

    def scoring(self, token_ids: np.ndarray) -> Self:
        """Restrict scoring to these tokens: [tokens] int64."""
        rows = self.head_rows
        own = None if rows is None else lambda places: rows(token_ids[places])
        return replace(self, token_ids=token_ids, head_rows=own)

    def described(self, kind: str, num_drafts: int) -> str:
        inputs = ", ".join(map(str, self.feature_layers))
        drafts = f"drafts {num_drafts} tokens a pass, " if num_drafts > 1 else ""
        vocab_size = self.config.vocab_size
        scored = vocab_size if self.token_ids is None else len(self.token_ids)
        return f"{kind} from features {inputs}, {drafts}scores {scored} of {vocab_size} tokens"


@dataclass(frozen=True, eq=False, kw_only=True)
class EagleHead(LayersHead):
    """EAGLE-1 and -2 (Li et al. 2024), EAGLE-3 (Li et al. 2025). It reads token i + 1 together with
    the target's features of token i.

    tensors, with optional ones in brackets:
        fc.weight [fc.bias]    makes its input from features, or from embedding and feature
        [fc_norm]              of all features, concatenated, before fc
        [feature_norm.K]       of feature K alone, before fc
        [embed_norm] [state_norm]  of embedding and feature, before fc joins them
        [embed] [head] [norm]  its own; else the target's embedding and output matrix, no norm
        layers.L.(q|k|v|o|gate|up|down).weight [layers.L.(q|k|v).bias]
        [layers.L.q_gate.weight]  its sigmoid gates attention's output
        layers.L.post_norm [layers.L.input_norm] [layers.0.hidden_norm] [layers.L.(q|k)_norm]
    and with experts
        layers.L.experts.N.(gate|up|down).weight  layers.L.(router|shared_gate).weight
    """

    drafted_by: ClassVar = "eagle"

    kind: str  # published name, such as "EAGLE-3"
    # fc joins embedding and feature (EAGLE-1); else fc joins features, and the first attention
    # reads embedding and feature concatenated (EAGLE-3).
    joins_embedding: bool = False
    # Embedding and feature are normed before fc, and so is the first layer's input.
    norms_inputs: bool = False
    adds_to_normed: bool = False  # the first layer's residual is the normed feature
    returns_normed: bool = False  # the next row continues from the last state after the norm
    window: int | None = None  # most tokens that a row sees; None: all that are kept
    experts: HeadExperts | None = None
    masks: MaskedRows | None = None  # to score several tokens in one pass

    def __str__(self) -> str:
        return self.described(self.kind, 1 if self.masks is None else self.masks.count)


@dataclass(frozen=True, eq=False)
class MedusaHead:
    """Medusa-1 heads (Cai et al. 2024): from the target's final state, the first predicts the token
    after the next one, later ones further ahead.

    blocks: each head's residual blocks, weight [hidden_size, hidden_size] and bias. outputs: each
    head's output matrix [scored tokens, hidden_size], or a shared one.
    """

    drafted_by: ClassVar = "medusa"

    path: Path
    hidden_size: int
    vocab_size: int  # the target's
    num_heads: int
    blocks: tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]
    outputs: tuple[HeadMatrix, ...]
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all

    def __str__(self) -> str:
        described = f"Medusa with {self.num_heads} heads"
        if self.token_ids is None:
            return described
        return f"{described}, scores {len(self.token_ids)} of {self.vocab_size} tokens"


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashHead(LayersHead):
    """Drafts a block in one pass (DFlash, by z-lab). Its layers read the pending token and mask
    tokens, which see the whole block and the target's features of earlier tokens. DSpark (DeepSeek)
    adds transitions between draft tokens and confidence in their acceptance.

    tensors: `EagleHead`'s fc.weight, norm, optional [embed] and [head], those of layers, all with
    input_norm and (q|k)_norm, and context_norm of fc's output, for all layers.
    """

    drafted_by: ClassVar = "dflash"

    block_size: int  # tokens, the pending one first
    mask_token: int  # in the target's vocabulary
    # Each row scores the token after its own, so the pending token's row drafts too; else the token
    # at its own place.
    scores_next: bool = False
    transitions: Transitions | None = None
    confidence: Confidence | None = None

    @property
    def scored(self) -> range:
        """Rows of a block that draft."""
        return range(0 if self.scores_next else 1, self.block_size)

    @property
    def keeps_states(self) -> bool:
        """Return whether drafting needs rows' states."""
        return self.confidence is not None

    def __str__(self) -> str:
        kind = "DFlash" if self.transitions is None else "DSpark"
        return self.described(kind, len(self.scored))

    def scoring(self, token_ids: np.ndarray) -> DFlashHead:
        transitions = self.transitions and self.transitions.scoring(token_ids)
        return replace(super().scoring(token_ids), transitions=transitions)


TrainedHead = EagleHead | MedusaHead | DFlashHead | AssistantHead

# Opens a head as `ComputesHeads` does, given its matrices by name: K.B for block B of Medusa head
# K, and output.K, or output.0 for all; for others as their drafters name them.
HeadBackend = Callable[[TrainedHead, Mapping[str, HeadMatrix]], Any]
