"""An exact model for tests of drafters and applications."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import (
    Capabilities,
    Forward,
    require_rollback,
    require_room,
    require_state,
)
from edge_spec.core.runtime_protocols import PassPart, forward_one_by_one
from edge_spec.core.tree import TokenTree

NextLogits = Callable[[tuple[int, ...]], np.ndarray]


def random_logits(vocab_size: int, order: int = 2, scale: float = 2.0) -> NextLogits:
    """Return a function whose logits depend pseudo-randomly on the last `order` tokens."""

    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        seed = [token + 1 for token in tokens[-order:]]
        return np.random.default_rng(seed).normal(0, scale, vocab_size).astype(np.float32)

    return next_logits


def smallest_config(architecture: str, vocab_size: int, context_length: int) -> ModelConfig:
    """Describe a model without weights: all other sizes are 1."""
    return ModelConfig(
        architecture=architecture,
        num_layers=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=vocab_size,
        context_length=context_length,
        norm_epsilon=1e-5,
        rope_theta=1.0,
    )


class ScriptedModel:
    """A model whose logits are a function of all tokens so far; exact for trees."""

    def __init__(self, next_logits: NextLogits, vocab_size: int, context_length: int = 512) -> None:
        self.next_logits = next_logits
        self.capabilities = Capabilities(
            max_rows=64, trees=True, rollback=True, hidden_states=False
        )
        self.config = smallest_config("scripted", vocab_size, context_length)

    def open_session(self) -> ScriptedSession:
        return ScriptedSession(self)

    def prepare_sharing(self, num_sessions: int) -> int:
        return num_sessions

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        return forward_one_by_one(parts)

    def close(self) -> None:
        pass


class ScriptedSession:
    """`committed` is what the KV cache would hold."""

    def __init__(self, model: ScriptedModel) -> None:
        self.committed: list[int] = []
        self._model = model
        self._tree: TokenTree | None = None

    @property
    def length(self) -> int:
        return len(self.committed)

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._model.config.context_length)
        self.committed += [int(token) for token in tokens]

    def forward(self, tree: TokenTree) -> Forward:
        require_room(self.length, len(tree), self._model.config.context_length)
        self._tree = tree
        paths = ([int(tree.tokens[i]) for i in tree.path(row)] for row in range(len(tree)))
        rows = [self._model.next_logits((*self.committed, *path)) for path in paths]
        return Forward(np.stack(rows))

    def commit(self, rows: Sequence[int]) -> None:
        if self._tree is None or self._tree.path(rows[-1]) != list(rows):
            raise ValueError(f"rows {list(rows)} are no path from row 0 of the last forward")
        self.committed += [int(self._tree.tokens[row]) for row in rows]
        self._tree = None

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        del self.committed[length:]

    def state(self) -> dict[str, np.ndarray]:
        return {"committed": np.array(self.committed, np.int32)}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        expected = {"committed": ((length,), np.int32)}
        require_state(state, expected, length, self._model.config.context_length)
        self.committed[:] = state["committed"].tolist()

    def close(self) -> None:
        self.committed.clear()
