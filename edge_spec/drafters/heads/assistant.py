"""Drafts with an assistant, which reads its target's own keys and values (Google 2026, Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from edge_spec.core.features import SharesKeysValues
from edge_spec.core.heads import AssistantHead, AssistantLayer, HeadMatrix, TargetTables
from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import Verdict
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.heads.drafting import HeadDrafter, RowScores
from edge_spec.drafters.heads.features import LastState, readers
from edge_spec.drafters.heads.layers import (
    FloatProducts,
    HeadNetwork,
    Heads,
    attend,
    one_blas_thread,
    output_matrix,
    own_matrix,
    rms_normed,
    rotate,
)
from edge_spec.drafters.protocol import TRAITS
from edge_spec.errors import UnsupportedModelError

KeysValues = Sequence[tuple[np.ndarray, np.ndarray]]  # [kv_heads, tokens, head_dim] each


class AssistantNetwork(HeadNetwork):
    """tables: the target's."""

    kind = AssistantHead.drafted_by

    def __init__(self, head: AssistantHead, tables: TargetTables) -> None:
        super().__init__(head.config.vocab_size, head.token_ids)
        self.head = head
        self.sources = tuple(dict.fromkeys(layer.source for layer in head.layers))
        self._embed = tables.embed
        self._products = FloatProducts(_matrices(head))
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
    ) -> RowScores:
        """tokens: [1], in the place of the pending one. states: [1, target_size], of the token
        before it. near: of `near`. The next row goes on from the state of what is returned."""
        embedded = self._embed(tokens) * np.float32(self.head.embedding_scale)
        stream = self._products("pre", np.concatenate([embedded, states], axis=1))
        for index, (layer, seen) in enumerate(zip(self.head.layers, near, strict=True)):
            stream = self._layer(stream, index, layer, position, seen)
        normed = self._normed(stream, "norm")
        scores, ids = self._scored(normed)
        return RowScores(scores[0], ids[0], state=self._products("post", normed)[0])

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
        queries = self._normed(queries, prefix + "q_norm")
        queries = rotate(queries, position * _frequencies(layer))
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
            ids = np.arange(scores.shape[1]) if self.token_ids is None else self.token_ids
            return scores, np.broadcast_to(ids, scores.shape)
        assert rows is not None
        found = self._products("centroids", normed)
        least = found.shape[1] - centroids.num_active
        active = np.argpartition(found, least, axis=1)[:, least:]
        tokens = centroids.ordering[active].reshape(len(normed), -1)
        with one_blas_thread():  # as other products between passes of the target
            each = [rows(ids) @ row for ids, row in zip(tokens, normed, strict=True)]
        return np.stack(each), tokens


def _matrices(head: AssistantHead) -> dict[str, HeadMatrix]:
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


def _gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, by the tangent."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


@cache
def _frequencies(layer: AssistantLayer) -> np.ndarray:
    assert layer.kind.rope is not None
    return layer.kind.rope.frequencies(layer.head_dim)


class TargetCache(LastState):
    """An assistant's view: its target's keys and values of the text, and the last state."""

    near: KeysValues = ()  # that rows see in this round
    num_tokens = 0  # of the text

    def __init__(self, network: AssistantNetwork) -> None:
        self._network = network
        self._session: SharesKeysValues | None = None

    @property
    def is_ready(self) -> bool:
        if self.state is None or self._session is None:
            return False
        position = self.num_tokens - 1
        found = [self._session.keys_values(layer) for layer in self._network.sources]
        seen = [each for each in found if each is not None and each[0].shape[1] >= position]
        if len(seen) < len(found):
            return False
        self.near = self._network.near(seen, position)
        return True

    def attach(self, session: Session, drafter: str) -> None:
        """Raises UnsupportedModelError where the runtime does not share keys and values."""
        if not isinstance(session, SharesKeysValues):
            raise UnsupportedModelError(
                f"the drafter {drafter} reads the target's own keys and values, which this "
                "runtime does not share",
                remedy="Use --runtime ort, or another drafter.",
            )
        session.share_keys_values(self._network.sources)
        self._session, readers[session], self.state = session, self, None

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.num_tokens = len(prompt)

    def observe(self, out: Forward, verdict: Verdict) -> None:
        super().observe(out, verdict)
        self.num_tokens += len(verdict.tokens)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and readers.get(session) is self:
            session.share_keys_values(())


class AssistantDrafter(HeadDrafter):
    """Drafts nothing in an answer's first round, before which no state is known. network: of the
    assistant; drafters of several conversations share it."""

    traits = TRAITS["assistant"]
    _target: TargetCache

    def __init__(self, network: AssistantNetwork) -> None:
        super().__init__(network, TargetCache(network))
        self._network = network

    def _score(self, path: Path) -> RowScores:
        state = self._row(path[:-1]).state if path else self._target.state
        assert state is not None
        token, position = np.array([path[-1] if path else self._pending]), self._target.num_tokens
        return self._network.draft(token, state.reshape(1, -1), position - 1, self._target.near)
