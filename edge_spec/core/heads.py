"""Trained heads: small networks that draft from what a target has computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import LayerKind

# Likeliest tokens of a row that are weighed by the token before. To weigh all of them, a matrix as
# long as the vocabulary would be read for each draft token.
SHORTLIST = 512


class FollowsBy(Enum):
    """Says what of a draft token decides which tokens are likelier after it (DSpark)."""

    TOKEN = "vanilla"  # the token
    GATED = "gated"  # the token, of which the state of the row that is scored lets a part through
    RECURRENT = "rnn"  # all draft tokens so far, and the state of the row that is scored


@dataclass(frozen=True, eq=False)
class Transitions:
    """What is likelier after which token (DSpark's Markov head): the product of two rows is added
    to a logit, one of the token before, or what `joined` makes of it, and one of the token that is
    scored. joined: weight [out, in] and bias [out]."""

    kind: FollowsBy
    rank: int
    after: Callable[[np.ndarray], np.ndarray]  # [tokens] int of the target -> [tokens, rank]
    scored: Callable[[np.ndarray], np.ndarray]  # [tokens] int that are scored -> [tokens, rank]
    joined: tuple[np.ndarray, np.ndarray] | None = None

    def scoring(self, token_ids: np.ndarray) -> Transitions:
        """Return those of a head of all tokens that scores these alone: [tokens] int64."""
        rows = self.scored
        return replace(self, scored=lambda places: rows(token_ids[places]))


@dataclass(frozen=True, eq=False)
class Confidence:
    """Gives a draft token's chance to be accepted: the logistic function of a sum of products."""

    weight: np.ndarray  # [hidden_size (+ rank)], of a state and of the row of the token before
    bias: float


class AssistantLayer(NamedTuple):
    """Says how a layer of an assistant attends."""

    kind: LayerKind
    source: int  # the target's layer whose keys and values it reads
    head_dim: int


class Centroids(NamedTuple):
    """Say which tokens are scored: those of the clusters whose centroids score highest. ordering:
    [clusters, tokens of each] int64, the tokens of the target."""

    weight: np.ndarray  # [clusters, hidden_size] float32
    ordering: np.ndarray
    num_active: int


@dataclass(frozen=True, eq=False)
class AssistantHead:
    """A small model without keys and values of its own: its layers read those that the target has
    of the text (Google 2026, the assistants of Gemma 4). Every draft token is made at the position
    of the pending token, of the token before it and of the state that came with that.

    tensors: float32, which may be read again whenever they are asked for; matrices [out, in]:

        pre.weight             joins the target's embedding of a token and a state of its width
        post.weight            makes the next such state
        norm                   of the last layer
        layers.L.(q|o|gate|up|down).weight
        layers.L.(input_norm|q_norm|attended_norm|mlp_norm|added_norm)
        layers.L.scale         of what the layer gives on
    """

    drafted_by: ClassVar = "assistant"  # the drafter's name

    path: Path
    config: ModelConfig  # of its layers; vocab_size and context_length are the target's
    target_size: int  # the target's hidden_size
    embedding_scale: float  # of the target's embedding
    layers: tuple[AssistantLayer, ...]
    tensors: Mapping[str, np.ndarray]
    # Rows of its output matrix [vocab, hidden_size] float32.
    output_rows: Callable[[np.ndarray], np.ndarray] | None = None
    centroids: Centroids | None = None
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all of them

    def __str__(self) -> str:
        sources = ", ".join(map(str, dict.fromkeys(layer.source for layer in self.layers)))
        told = f"assistant of {len(self.layers)} layers, reads keys and values of layers {sources}"
        return f"{told}, scores {self.num_scored} of {self.config.vocab_size} tokens"

    @property
    def num_scored(self) -> int:
        """Count the tokens of a row that are scored."""
        if self.centroids is not None:
            return self.centroids.num_active * int(self.centroids.ordering.shape[1])
        return self.config.vocab_size if self.token_ids is None else len(self.token_ids)

    def scoring(self, token_ids: np.ndarray) -> AssistantHead:
        """Return one that scores these tokens alone: [tokens] int64."""
        return replace(self, token_ids=token_ids)


class TargetTables(Protocol):
    """The tables of a target that a head may share with it."""

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """tokens: [rows] int -> [rows, hidden_size] float32."""

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        """Return these rows of the matrix that scores tokens, all where None: [tokens,
        hidden_size] float32."""


@dataclass(frozen=True, eq=False)
class HeadMatrix:
    """A matrix [out, in] that a head multiplies with. parts: each reads some of its rows, [rows,
    in] float32, in order. bias: [out]. is_output: it scores tokens."""

    parts: tuple[Callable[[], np.ndarray], ...]
    bias: np.ndarray | None = None
    is_output: bool = False


FLOAT_BITS = 32  # of matrices in float32
WEIGHTS_FILE = "weights.bin"  # where graphs of heads say that their weights are


@dataclass(frozen=True, eq=False)
class StoredStep:
    """A head's step as an exporter stores it: a serialized graph without its matrices, and these,
    the path of a WEIGHTS_FILE or what would be in it."""

    graph: bytes
    weights: Path | bytes


@dataclass(frozen=True, eq=False)
class EntryRows:
    """Rows that an EAGLE head's layers read in one pass: as many entries of its cache, from slot
    `start` on."""

    embedded: np.ndarray  # [rows, hidden_size] float32 of the tokens
    found: np.ndarray  # [known, features_size] float32: the target's features of some rows,
    states: np.ndarray  # [rows - known, hidden_size] float32: what takes their place in the others
    order: np.ndarray  # [rows] int: which of these each row has, those found before the states
    positions: np.ndarray  # [rows] int
    start: int
    sees: np.ndarray | None  # [rows, start + rows] bool, no slot after its own; None: all of them
    scored: np.ndarray  # [scored] int: which rows are scored, at least one


# All layers of an EAGLE head in one call, for one cache of keys and values: writes the entries, and
# returns the states from which the next rows go on, [rows, hidden_size], and the logits of the
# scored rows, [scored, scored tokens], both float32.
EagleStep = Callable[[EntryRows], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class HeadScores:
    """What independent heads say of tokens; the likeliest in falling order, with their shares of e
    to the logits."""

    logits: np.ndarray  # [heads, scored tokens] float32
    likeliest: np.ndarray  # [heads, some] int64, of the scored tokens
    shares: np.ndarray  # [heads, some] float32
    states: np.ndarray | None = None  # [heads, hidden_size] that were scored, where asked for


# Medusa heads in one call, of a state [hidden_size] float32 and the heads to score, in order.
MedusaStep = Callable[[np.ndarray, Sequence[int]], HeadScores]


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A block that a DFlash head drafts, and the tokens before it whose entries of the cache are
    made, from slot `start` on."""

    embedded: np.ndarray  # [block, hidden_size] float32 of the pending token and masks
    found: np.ndarray  # [known, features_size] float32: the target's features of tokens
    position: int  # in the text, of the first of these, which the block follows
    start: int
    num_seen: int  # entries before the block that it sees at most, the last ones
    scored: range  # rows of the block


# All layers of a DFlash head in one call, for one cache: writes the entries of known tokens, and
# scores rows of the block.
BlockStep = Callable[[BlockRows], HeadScores]


@runtime_checkable
class ComputesHeads(Protocol):
    """A runtime that computes heads' steps as an exporter has stored them."""

    def open_head(self, stored: StoredStep, head: TrainedHead, threads: int | None) -> Any:
        """Return a MedusaStep; of other heads what has `bound_to(cache)`, which returns an
        EagleStep or a BlockStep. cache: [layers, 2, kv_heads, slots, head_dim] float32, finite
        numbers, in whose place the step writes keys and values. threads: None: one. Raises
        ModelFileError for what it cannot read."""


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """What rows read of which nothing is known, to score several tokens in one pass (P-EAGLE)."""

    token: int  # of the target's vocabulary
    features: np.ndarray  # [features_size] float32, in the place of the target's
    count: int  # tokens that are scored in one pass, that of the pending token's row among them


@dataclass(frozen=True)
class HeadExperts:
    """Experts in the place of a head's MLPs, beside a gated one (Qwen Team 2026, Qwen 3.5)."""

    count: int
    used: int  # by each row
    size: int  # of the MLP of one


@dataclass(frozen=True, eq=False, kw_only=True)
class LayersHead:
    """A head that drafts by decoder layers of its own. config: of these; vocab_size and
    context_length are the target's. tensors: float32, which may be read again whenever they are
    asked for; matrices [out, in]."""

    path: Path
    config: ModelConfig
    feature_layers: tuple[int, ...]  # as `core.features` counts them
    feature_size: int  # the target's hidden_size
    tensors: Mapping[str, np.ndarray]
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all of them
    # Rows [rows, hidden_size] of its own embedding, without reading all of it.
    embed_rows: Callable[[np.ndarray], np.ndarray] | None = None
    # Rows of its own output matrix, by places among the scored tokens.
    head_rows: Callable[[np.ndarray], np.ndarray] | None = None

    def scoring(self, token_ids: np.ndarray) -> Self:
        """Return a head of all tokens that scores these alone: [tokens] int64."""
        rows = self.head_rows
        own = None if rows is None else lambda places: rows(token_ids[places])
        return replace(self, token_ids=token_ids, head_rows=own)

    def described(self, kind: str, num_drafts: int) -> str:
        """Say what it reads, drafts in a pass and scores, in a line."""
        inputs = ", ".join(map(str, self.feature_layers))
        drafts = f"drafts {num_drafts} tokens a pass, " if num_drafts > 1 else ""
        vocab_size = self.config.vocab_size
        scored = vocab_size if self.token_ids is None else len(self.token_ids)
        return f"{kind} from features {inputs}, {drafts}scores {scored} of {vocab_size} tokens"


@dataclass(frozen=True, eq=False, kw_only=True)
class EagleHead(LayersHead):
    """A head that drafts by layers of its own: EAGLE-1 and -2 (Li et al. 2024), EAGLE-3 (Li et al.
    2025). It reads token i + 1 beside the target's features of token i.

    tensors: by these names, those in brackets only where it has them:

        fc.weight [fc.bias]    what makes its input of features, or of embedding and feature
        [fc_norm]              of all features beside each other, before fc
        [feature_norm.K]       of feature K alone, before fc
        [embed_norm] [state_norm]  of embedding and feature, before fc joins them
        [embed] [head] [norm]  of its own; else the target's embedding and output matrix, no norm
        layers.L.(q|k|v|o|gate|up|down).weight [layers.L.(q|k|v).bias]
        [layers.L.q_gate.weight]  whose sigmoids what attention mixes is multiplied with
        layers.L.post_norm [layers.L.input_norm] [layers.0.hidden_norm] [layers.L.(q|k)_norm]

    and where there are experts

        layers.L.experts.N.(gate|up|down).weight  layers.L.(router|shared_gate).weight
    """

    drafted_by: ClassVar = "eagle"  # the drafter's name

    kind: str  # as it is published, such as "EAGLE-3"
    # fc joins embedding and feature (EAGLE-1); else it joins features, and the first layer's
    # attention reads embedding and feature beside each other (EAGLE-3).
    joins_embedding: bool = False
    # Embedding and feature are normed before fc joins them, and so is what the first layer reads.
    norms_inputs: bool = False
    adds_to_normed: bool = False  # the first layer adds to the normed feature
    returns_normed: bool = False  # what it goes on from is its last state after the norm
    window: int | None = None  # tokens that a row sees at most; None: as many as are kept
    experts: HeadExperts | None = None
    masks: MaskedRows | None = None  # of a head that scores several tokens in one pass

    def __str__(self) -> str:
        return self.described(self.kind, 1 if self.masks is None else self.masks.count)


@dataclass(frozen=True, eq=False)
class MedusaHead:
    """Heads that each predict one token, further and further ahead, from the target's final state
    (Cai et al. 2024, Medusa-1): the first the token after the next one. blocks: of each head,
    weight [hidden_size, hidden_size] and bias of its residual blocks. outputs: of each head, its
    output matrix [scored tokens, hidden_size], or one that all share.
    """

    drafted_by: ClassVar = "medusa"  # the drafter's name

    path: Path
    hidden_size: int
    vocab_size: int  # the target's
    num_heads: int
    blocks: tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]
    outputs: tuple[HeadMatrix, ...]
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all of them

    def __str__(self) -> str:
        described = f"Medusa with {self.num_heads} heads"
        if self.token_ids is None:
            return described
        return f"{described}, scores {len(self.token_ids)} of {self.vocab_size} tokens"


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashHead(LayersHead):
    """A head that drafts a block of tokens in one pass (DFlash, by z-lab): its layers read the
    pending token and mask tokens after it, each of which sees the whole block and the target's
    features of all tokens before. DSpark (DeepSeek) also knows which tokens are likelier after
    which draft tokens, and how likely these are to be accepted.

    tensors: `EagleHead`'s fc.weight, norm, maybe [embed] and [head], those of layers, all with
    input_norm and (q|k)_norm, and context_norm of what fc makes of features, for all layers.
    """

    drafted_by: ClassVar = "dflash"  # the drafter's name

    block_size: int  # tokens, of which the first is the pending one
    mask_token: int  # of the target's vocabulary
    # Each row scores the token after its own, so that the pending token's drafts, too; else a row
    # scores the token in its own place.
    scores_next: bool = False
    transitions: Transitions | None = None
    confidence: Confidence | None = None

    @property
    def scored(self) -> range:
        """Rows of a block that draft."""
        return range(0 if self.scores_next else 1, self.block_size)

    @property
    def keeps_states(self) -> bool:
        """Return whether more than logits is read of rows."""
        by = self.transitions and self.transitions.kind
        return self.confidence is not None or by not in (None, FollowsBy.TOKEN)

    def __str__(self) -> str:
        kind = "DFlash" if self.transitions is None else "DSpark"
        return self.described(kind, len(self.scored))

    def scoring(self, token_ids: np.ndarray) -> DFlashHead:
        transitions = self.transitions and self.transitions.scoring(token_ids)
        return replace(super().scoring(token_ids), transitions=transitions)


TrainedHead = EagleHead | MedusaHead | DFlashHead | AssistantHead

# Opens a head as `ComputesHeads` does, given all of its matrices: K.B of block B of Medusa head K,
# and output.K, or output.0 for all; of others as their drafters name them.
HeadBackend = Callable[[TrainedHead, Mapping[str, HeadMatrix]], Any]
