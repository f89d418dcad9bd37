"""Drafts with an assistant, which reads its target's own keys and values (Google 2026, Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.features import SharesKeysValues
from edge_spec.core.heads import AssistantHead, AssistantLayer, HeadMatrix, TargetTables
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_tree import Path
from edge_spec.drafters.heads.drafting import SerialDrafter
from edge_spec.drafters.heads.layers import (
    FloatProducts,
    Heads,
    attend,
    likeliest,
    one_blas_thread,
    output_matrix,
    own_matrix,
    rms_normed,
    rotate,
)
from edge_spec.drafters.protocol import TRAITS, Budget
from edge_spec.errors import UnsupportedModelError

KeysValues = Sequence[tuple[np.ndarray, np.ndarray]]  # [kv_heads, tokens, head_dim] each


class Drafted(NamedTuple):
    """What an assistant makes of a row: scores and the tokens that they are of, [1, scored] each,
    and the state that the next row goes on from, [1, target_size]."""

    scores: np.ndarray
    tokens: np.ndarray
    states: np.ndarray


class AssistantNetwork:
    """It keeps no text. tables: the target's."""

    kind = AssistantHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, head: AssistantHead, tables: TargetTables) -> None:
        self.head, self.vocab_size = head, head.config.vocab_size
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

    def spread(self, found: Drafted) -> np.ndarray:
        """[vocab of the target] float32; tokens that it does not score have -inf."""
        spread = np.full(self.vocab_size, -np.inf, np.float32)
        spread[found.tokens[0]] = found.scores[0]
        return spread

    def likeliest(self, found: Drafted) -> list[tuple[int, int]]:
        """See `layers.likeliest`."""
        return likeliest(found.scores[0], found.tokens[0])

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


def _gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, by the tangent."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


@cache
def _frequencies(layer: AssistantLayer) -> np.ndarray:
    assert layer.kind.rope is not None
    return layer.kind.rope.frequencies(layer.head_dim)


# Who reads a session's keys and values: the drafter that was attached last. One that takes its
# place is attached before it is closed.
_readers: WeakKeyDictionary[Any, AssistantDrafter] = WeakKeyDictionary()


class AssistantDrafter(SerialDrafter[Drafted]):
    """Has no cache of its own. Drafts nothing in an answer's first round, before which no state is
    known. network: of the assistant; drafters of several conversations share it."""

    traits = TRAITS["assistant"]

    def __init__(self, network: AssistantNetwork, name: str = "assistant") -> None:
        super().__init__(network, name)
        self._network = network
        self._num_tokens = 0  # of the text
        self._pending = 0
        self._state: np.ndarray | None = None  # that came with the token before the pending one
        self._near: KeysValues = ()  # that rows see in this round
        self._target: SharesKeysValues | None = None

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not share keys and values."""
        if not isinstance(session, SharesKeysValues):
            raise UnsupportedModelError(
                f"the drafter {self.name} reads the target's own keys and values, which this "
                "runtime does not share",
                remedy="Use --runtime ort, or another drafter.",
            )
        session.share_keys_values(self._network.sources)
        self._target, _readers[session], self._state = session, self, None

    def begin(self, prompt: Sequence[int]) -> None:
        self._num_tokens, self._state = len(prompt), None
        super().begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._pending = pending
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._num_tokens += len(verdict.tokens)
        self._state = None
        if out.hidden is not None and verdict.tokens:
            self._state = out.hidden[verdict.kept[-1]].copy()
        super().observe(tree, out, verdict)

    def close(self) -> None:
        session, self._target = self._target, None
        if session is not None and _readers.get(session) is self:
            session.share_keys_values(())

    @property
    def _is_ready(self) -> bool:
        """Says whether the target has the keys and values of all tokens before the pending one, and
        the state of the last of these is known."""
        if self._state is None or self._target is None:
            return False
        position = self._num_tokens - 1
        found = [self._target.keys_values(layer) for layer in self._network.sources]
        seen = [each for each in found if each is not None and each[0].shape[1] >= position]
        if len(seen) < len(found):
            return False
        self._near = self._network.near(seen, position)
        return True

    def _score(self, path: Path) -> Drafted:
        state = self._known[path[:-1]].states if path else self._state
        assert state is not None
        token = np.array([path[-1] if path else self._pending])
        return self._network.draft(token, state.reshape(1, -1), self._num_tokens - 1, self._near)
