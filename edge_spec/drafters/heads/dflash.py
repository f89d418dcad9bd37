"""Drafts with a DFlash head (z-lab): all tokens of a block in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.heads import (
    BindsBlocks,
    BlockRows,
    BlockStep,
    DFlashHead,
    HeadBackend,
    HeadScores,
    TargetTables,
)
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.eagle_session import WINDOW
from edge_spec.drafters.heads.feature_store import TargetFeatures
from edge_spec.drafters.heads.independent import IndependentDrafter, head_scores
from edge_spec.drafters.heads.layers import (
    FloatProducts,
    HeadLayers,
    attend,
    layer_matrices,
    own_matrix,
    targets_output,
)
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits

_ROWS_AT_ONCE = 256


class DFlashNetwork:
    """A head's weights, and what computes with them; it keeps no text. tables: the target's.
    backend: what computes its steps; by default numpy does, in float32."""

    kind = DFlashHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter
    shares_output = True  # all rows are scored at once

    def __init__(
        self, head: DFlashHead, tables: TargetTables, backend: HeadBackend | None = None
    ) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self.features_size = len(head.feature_layers) * head.feature_size
        self.num_heads = head.block_size - 1  # rows that draft
        matrices = {"fc": own_matrix(head.tensors, ["fc"])}
        for layer in range(head.config.num_layers):
            matrices |= layer_matrices(head.tensors, f"layers.{layer}.")
        matrices["head"] = targets_output(tables, None, head.config.vocab_size)
        self._step: BindsBlocks = (
            DFlashFormulas(head, FloatProducts(matrices))
            if backend is None
            else backend.dflash_step(head, matrices)
        )
        self._embed = tables.embed
        self._masks = tables.embed(np.full(self.num_heads, head.mask_token))

    def bound_to(self, cache: np.ndarray) -> BlockStep:
        """See BindsBlocks."""
        return self._step.bound_to(cache)

    def embedded(self, pending: int) -> np.ndarray:
        """[block_size, hidden_size] of the block after this token."""
        return np.concatenate([self._embed(np.array([pending])), self._masks])

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """See IndependentHeads: it scores all tokens."""
        return scores


class DFlashFormulas:
    """Drafts where there is no backend; the steps of backends are compared with it."""

    def __init__(self, head: DFlashHead, products: FloatProducts) -> None:
        self._num_layers = head.config.num_layers
        self._products = products
        self._layers = HeadLayers(head.config, products, head.tensors)

    def bound_to(self, cache: np.ndarray) -> BlockStep:
        """See BindsBlocks."""
        return lambda rows: self._scores(rows, cache)

    def _scores(self, rows: BlockRows, cache: np.ndarray) -> HeadScores:
        """See BlockStep."""
        layers, known = self._layers, len(rows.found)
        context = layers.normed(self._products("fc", rows.found), "context_norm")
        at = rows.position + np.arange(known)
        end, stream = rows.start + known, rows.embedded
        positions = rows.position + known + np.arange(len(stream))
        first = max(end - rows.num_seen, 0)
        for layer in range(self._num_layers):
            cache[layer, :, :, rows.start : end] = layers.keys_values(context, layer, at)
            read = layers.normed(stream, f"layers.{layer}.input_norm")
            made = layers.heads(read, layer, positions)
            seen_keys, seen_values = cache[layer, :, :, first:end]
            keys = np.concatenate([seen_keys, made.keys], axis=1)
            values = np.concatenate([seen_values, made.values], axis=1)
            mixed = attend(made._replace(keys=keys, values=values), None)  # each row sees all rows
            stream = layers.leave(stream, mixed, layer)
        scored = layers.normed(stream[1 : 1 + rows.num_scored], "norm")
        return head_scores(self._products("head", scored))


class DFlashDrafter(IndependentDrafter):
    """network: of the head; drafters of several conversations share it."""

    traits = DrafterTraits(cost=Cost.PASS, target_session=True, head="dflash")

    def __init__(self, network: DFlashNetwork, name: str = "dflash") -> None:
        super().__init__(network, name)
        self._network = network
        self._target = TargetFeatures(network.feature_layers, network.features_size, WINDOW)
        config, self._pending = network.config, 0
        heads, size = config.num_kv_heads, config.head_dim
        self._cache = np.zeros((config.num_layers, 2, heads, 0, size), np.float32)
        self._step = network.bound_to(self._cache)
        self._first = self._end = 0  # positions that the cache has entries of, from slot 0 on

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)
        self._forget(0)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._forget(self._target.begin(prompt))

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._pending = pending
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._target.observe(out, verdict)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._target.forget()
        self._forget(0)

    def close(self) -> None:
        self._target.close()
        super().close()

    @property
    def _is_ready(self) -> bool:
        return self._target.is_ready

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Reads what is missing of the text, too, at most its last WINDOW tokens."""
        store, end = self._target.store, len(self._target.text) - 1
        if self._end < max(store.first, end - 2 * WINDOW):  # nobody knows what is between
            self._first = self._end = max(store.first, end - WINDOW)
        block = self._network.embedded(self._pending)
        while end - self._end > _ROWS_AT_ONCE:
            self._read(block[:1], self._end + _ROWS_AT_ONCE, 0)
        return self._read(block, end, len(heads))

    def _read(self, block: np.ndarray, end: int, num_scored: int) -> HeadScores:
        """Reads the text up to this position, and a block after it."""
        positions = np.arange(self._end, end)
        self._make_room(len(positions))
        found = self._step(
            BlockRows(
                block,
                self._target.store.get(positions),
                self._end,
                self._end - self._first,
                WINDOW,
                num_scored,
            )
        )
        self._end = end
        return found

    def _make_room(self, count: int) -> None:
        """Makes room for more entries. A text of twice the window is cut to it."""
        surplus = self._end - self._first - WINDOW
        if surplus > WINDOW:
            self._cache = self._cache[..., surplus:, :].copy()
            self._first += surplus
        missing = self._end - self._first + count - self._cache.shape[3]
        if missing > 0:
            grown = max(missing, _ROWS_AT_ONCE)
            self._cache = np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)])
        if surplus > WINDOW or missing > 0:
            self._step = self._network.bound_to(self._cache)

    def _forget(self, end: int) -> None:
        """Forgets the entries from this position on."""
        self._end = max(min(self._end, end), self._first)
        if self._end == self._first:
            self._first = self._end = 0
