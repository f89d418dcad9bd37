"""Drafts with an assistant, which reads its target's own keys and values (Google 2026, Gemma 4).

Trees, samples and how sure the assistant must be are those of `DraftModelDrafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.features import SharesKeysValues
from edge_spec.core.heads import AssistantHead, AssistantLayer, HeadMatrix, TargetTables
from edge_spec.core.model import Capabilities, Forward, Model, Session, require_rollback
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.draft.draft_tree import DraftChooser, candidates_after, ranked
from edge_spec.drafters.draft.synced_session import AheadChoice, Path
from edge_spec.drafters.heads.layers import (
    FloatProducts,
    Heads,
    attend,
    one_blas_thread,
    output_matrix,
    own_matrix,
    rms_normed,
)
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits
from edge_spec.drafters.tree_builder import Candidate
from edge_spec.errors import UnsupportedModelError

KeysValues = Sequence[tuple[np.ndarray, np.ndarray]]  # [kv_heads, tokens, head_dim] each


class Drafted(NamedTuple):
    """What an assistant makes of rows: scores and the tokens that they are of, [rows, scored]
    each, and the states that the next rows go on from, [rows, target_size]."""

    scores: np.ndarray
    tokens: np.ndarray
    states: np.ndarray


class AssistantNetwork:
    """It keeps no text. tables: the target's."""

    kind = AssistantHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, head: AssistantHead, tables: TargetTables) -> None:
        self.head = head
        self.sources = tuple(dict.fromkeys(layer.source for layer in head.layers))
        self._embed = tables.embed
        matrices = assistant_matrices(head)
        self._products = FloatProducts(matrices)
        self._vectors = {n: head.tensors[n] for n in head.tensors if n.endswith(("norm", "scale"))}

    def near(self, seen: KeysValues, position: int) -> KeysValues:
        """Returns the keys and values that a row at this position sees in each layer, in float32.
        seen: those of each of `sources`."""
        by_source = dict(zip(self.sources, seen, strict=True))
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for layer in self.head.layers:  # those of a source have the same window
            if layer.source not in found:
                window = layer.kind.window or position + 1
                first = max(position + 1 - window, 0)
                keys, values = (
                    np.ascontiguousarray(each[:, first:position], np.float32)
                    for each in by_source[layer.source]
                )
                found[layer.source] = keys, values
        return [found[layer.source] for layer in self.head.layers]

    def draft(
        self, tokens: np.ndarray, states: np.ndarray, position: int, near: KeysValues
    ) -> Drafted:
        """tokens: [rows], which all stand in the place of the pending one. states: [rows,
        target_size], that came with the tokens before them. near: as `near` returns them."""
        embedded = self._embed(tokens) * np.float32(self.head.embedding_scale)
        stream = self._products("pre", np.concatenate([embedded, states], axis=1))
        for index, (layer, seen) in enumerate(zip(self.head.layers, near, strict=True)):
            stream = self._layer(stream, index, layer, position, seen)
        normed = self._normed(stream, "norm")
        return Drafted(*self._scored(normed), self._products("post", normed))

    def spread(self, scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[vocab of the target] float32 of one row; tokens that it does not score have -inf."""
        spread = np.full(self.head.config.vocab_size, -np.inf, np.float32)
        spread[tokens] = scores
        return spread

    def likeliest(self, scores: np.ndarray, tokens: np.ndarray) -> list[tuple[int, int]]:
        """(token, kind of draft token) of one row, in falling order. Raises ValueError for scores
        that no choice can be made by."""
        peak = scores.max()
        if not np.isfinite(peak):  # NaN, where any of them is
            raise ValueError("logits that are not finite")
        return [(int(tokens[at]), kind) for at, kind in ranked(np.exp(scores - peak))]

    def _layer(
        self,
        stream: np.ndarray,
        index: int,
        layer: AssistantLayer,
        position: int,
        seen: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        prefix = f"layers.{index}."
        queries = self._products(prefix + "q", self._normed(stream, prefix + "input_norm"))
        queries = queries.reshape(len(stream), -1, layer.head_dim).swapaxes(0, 1)
        queries = _turned(self._normed(queries, prefix + "q_norm"), layer, position)
        # `attend` divides by the root of a head's size, which queries here are not.
        queries = queries * np.float32(np.sqrt(layer.head_dim))
        mixed = attend(Heads(queries, *seen), None)
        beside = mixed.swapaxes(0, 1).reshape(len(stream), -1)
        attended = self._products(prefix + "o", beside)
        stream = stream + self._normed(attended, prefix + "attended_norm")
        read = self._normed(stream, prefix + "mlp_norm")
        gate, up = np.split(self._products(prefix + "gate_up", read), 2, axis=1)
        added = self._products(prefix + "down", _gelu(gate) * up)
        stream = stream + self._normed(added, prefix + "added_norm")
        scaled: np.ndarray = stream * self._vectors[prefix + "scale"]
        return scaled

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_normed(x, self._vectors[name], self.head.config.norm_epsilon)

    def _scored(self, normed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centroids, rows = self.head.centroids, self.head.output_rows
        if centroids is None:
            scores = self._products("head", normed)
            ids = self.head.token_ids
            ids = np.arange(scores.shape[1]) if ids is None else ids
            return scores, np.broadcast_to(ids, scores.shape)
        assert rows is not None
        found = self._products("centroids", normed)
        least = found.shape[1] - centroids.num_active
        active = np.argpartition(found, least, axis=1)[:, least:]
        tokens = centroids.ordering[active].reshape(len(normed), -1)
        with one_blas_thread():  # as other products between passes of the target
            each = [rows(ids) @ row for ids, row in zip(tokens, normed, strict=True)]
        return np.stack(each), tokens


def assistant_matrices(head: AssistantHead) -> dict[str, HeadMatrix]:
    """Returns what an assistant multiplies with, but for the rows that clusters choose."""
    matrices = {name: own_matrix(head.tensors, [name]) for name in ("pre", "post")}
    for layer in range(len(head.layers)):
        prefix = f"layers.{layer}."
        joined = {"q": ["q"], "o": ["o"], "gate_up": ["gate", "up"], "down": ["down"]}
        matrices |= {
            prefix + name: own_matrix(head.tensors, [prefix + each for each in parts])
            for name, parts in joined.items()
        }
    if head.centroids is not None:
        weight = head.centroids.weight
        return matrices | {"centroids": HeadMatrix((partial(np.asarray, weight),))}
    assert head.output_rows is not None
    ids = np.arange(head.config.vocab_size) if head.token_ids is None else head.token_ids
    return matrices | {"head": output_matrix(head.output_rows, ids)}


def _turned(x: np.ndarray, layer: AssistantLayer, position: int) -> np.ndarray:
    """x: [heads, rows, head_dim], halves paired (Su et al. 2021)."""
    angles = position * _frequencies(layer)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, by the tangent."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


@cache
def _frequencies(layer: AssistantLayer) -> np.ndarray:
    assert layer.kind.rope is not None
    return layer.kind.rope.frequencies(layer.head_dim)


_MAX_ROWS = 64
# Who reads a session's keys and values: the drafter that was attached last. One that takes its
# place is attached before it is closed.
_readers: WeakKeyDictionary[Any, AssistantDrafter] = WeakKeyDictionary()


class AssistantChooser(DraftChooser):
    """Reads rows of `AssistantSession`: scores and the tokens that they are of."""

    def __init__(self, network: AssistantNetwork) -> None:
        vocab_size = network.head.config.vocab_size
        super().__init__(vocab_size, vocab_size)
        self._network = network

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> AheadChoice:
        if not self._sampler.prefers_by_logits:
            return super().choose(logits, path)
        return AheadChoice(*self._network.likeliest(*logits)[0], None)

    def likeliest(self, logits: np.ndarray, path: Path) -> list[Candidate[Path]]:
        if not self._sampler.prefers_by_logits:
            return super().likeliest(logits, path)
        return candidates_after(path, self._network.likeliest(*logits))

    def fitted(self, logits: np.ndarray) -> np.ndarray:
        scores, tokens = logits
        return super().fitted(self._network.spread(scores, tokens.astype(np.int64)))


class AssistantModel:
    """Its sessions read the text that a target has read."""

    capabilities = Capabilities(max_rows=_MAX_ROWS, trees=True, rollback=True, hidden_states=False)

    def __init__(self, network: AssistantNetwork) -> None:
        self.config = network.head.config
        self._network = network

    def open_session(self) -> AssistantSession:
        return AssistantSession(self._network)

    def close(self) -> None:
        """Has nothing open."""


class AssistantSession:
    """Has no cache. Of a text it needs the state of the token before the pending one, which
    `go_on_from` gives; rows after the pending token go on from those before them."""

    def __init__(self, network: AssistantNetwork) -> None:
        self.length = 0
        self._network = network
        self._target: SharesKeysValues | None = None
        self._near: KeysValues | None = None  # that rows see, of this pending token
        self._pending = 0  # its position
        self._states: dict[int, np.ndarray] = {}  # of committed tokens, by position
        self._last = np.empty((0, network.head.target_size), np.float32)  # of the last pass

    def attach(self, target: SharesKeysValues) -> None:
        self._target, self._near = target, None

    def go_on_from(self, pending: int, state: np.ndarray) -> None:
        """pending: its position; state: [target_size] that came with the token before it."""
        self._pending, self._states, self._near = pending, {pending - 1: state}, None

    @property
    def is_ready(self) -> bool:
        """Says whether the target has the keys and values of all tokens before the pending one."""
        found = self._seen()
        is_known = len(found) == len(self._network.sources)
        return is_known and all(keys.shape[1] >= self._pending for keys, _ in found)

    def _seen(self) -> KeysValues:
        assert self._target is not None
        found = (self._target.keys_values(layer) for layer in self._network.sources)
        return [each for each in found if each is not None]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Reads draft tokens; the text before them is the target's."""
        skipped = min(max(self._pending - self.length, 0), len(tokens))
        self.length += skipped
        if skipped < len(tokens):
            chain = TokenTree.chain(tokens[skipped], tokens[skipped + 1 :])
            self.forward(chain)
            self.commit(range(len(chain)))

    def forward(self, tree: TokenTree) -> Forward:
        """Its logits are [rows, 2, scored tokens]: scores, and the tokens that they are of. Of rows
        before the pending token, which are the target's, they are zeros."""
        near = self._near or self._network.near(self._seen(), self._pending)
        self._near = near
        self._last = np.zeros((len(tree), self._network.head.target_size), np.float32)
        first = max(self._pending - self.length, 0)  # depth that is drafted from first
        found = np.zeros((len(tree), 2, self._network.head.num_scored), np.float32)
        for depth in range(first, int(tree.depths.max()) + 1):
            at = np.flatnonzero(tree.depths == depth)
            before = tree.parents[at]
            known = self._states.get(self.length + depth - 1)
            if depth > first or known is None:
                states = self._last[before] * (before >= 0)[:, None]
            else:
                states = np.broadcast_to(known, (len(at), len(known)))
            drafted = self._network.draft(tree.tokens[at], states, self._pending, near)
            self._last[at] = drafted.states
            found[at, 0], found[at, 1] = drafted.scores, drafted.tokens
        return Forward(found)

    def commit(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self.length >= self._pending:
                self._states[self.length] = self._last[row]
            self.length += 1

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length = length

    def close(self) -> None:
        """Has nothing open."""


class AssistantDrafter(DraftModelDrafter):
    """Drafts nothing in an answer's first round, before which no state is known. network: of the
    assistant; drafters of several conversations share it."""

    traits = DrafterTraits(
        trees=True,
        cost=Cost.PASS,
        samples=True,
        target_session=True,
        hidden_states=True,
        head="assistant",
    )

    def __init__(self, network: AssistantNetwork, name: str = "assistant") -> None:
        self._network = network
        model = AssistantModel(network)
        self._session = model.open_session()
        self._num_tokens = 0  # of the text
        self._is_ready = False
        self._shared: SharesKeysValues | None = None  # by a session that it is attached to
        chooser = AssistantChooser(network)
        vocab_size = network.head.config.vocab_size
        super().__init__(model, self._session, vocab_size, name=name, chooser=chooser)
        self.reported_acceptance = network.reported_acceptance

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not share keys and values."""
        if not isinstance(session, SharesKeysValues):
            raise UnsupportedModelError(
                f"the drafter {self.name} reads the target's own keys and values, which this "
                "runtime does not share",
                remedy="Use --runtime ort, or another drafter.",
            )
        session.share_keys_values(self._network.sources)
        self._session.attach(session)
        self._shared, _readers[session], self._is_ready = session, self, False

    def prepare(self, prompt: Sequence[int]) -> None:
        """Waits: the target has not read the prompt yet."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._num_tokens, self._is_ready = len(prompt), False
        super().begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if not self._is_ready or not self._session.is_ready:
            return TokenTree.chain(pending)
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._num_tokens += len(verdict.tokens)
        self._is_ready = out.hidden is not None and bool(verdict.tokens)
        if self._is_ready:
            assert out.hidden is not None
            state = out.hidden[verdict.kept[-1]].copy()
            self._session.go_on_from(self._num_tokens - 1, state)
        super().observe(tree, out, verdict)

    def close(self) -> None:
        session, self._shared = self._shared, None
        if session is not None and _readers.get(session) is self:
            session.share_keys_values(())
        super().close()
