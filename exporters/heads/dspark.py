"""The parts of DSpark heads (DeepSeek) beside what they share with DFlash heads, as DeepSpec,
speculators, SpecForge and Liquid AI publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.transitions import Confidence, FollowsBy, Transitions
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.heads.eagle_tensors import Shapes
from edge_spec.exporters.stored_tensor import StoredTensor

AFTER, SCORED = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CONFIDENCE = "confidence_head.proj"
_JOINED = {FollowsBy.GATED: "markov_head.gate_proj", FollowsBy.RECURRENT: "markov_head.joint_proj"}
_PARTS = ("markov_", "confidence_")  # how names of such tensors begin
_ALSO = {"markov_w1.weight": AFTER, "markov_w2.weight": SCORED}


@dataclass(frozen=True)
class DSparkParts:
    """The tensors of these parts, by the names that DeepSpec has; none for a DFlash head."""

    path: Path
    values: Mapping[str, Any]  # what config.json states of the head
    tensors: Mapping[str, StoredTensor]

    @property
    def rank(self) -> int:
        return self.tensors[AFTER].shape[-1] if AFTER in self.tensors else 0

    @property
    def kind(self) -> FollowsBy:
        """Raises UnsupportedModelError for a kind that is not computed."""
        told = self.values.get("markov_head_type", FollowsBy.TOKEN.value)
        try:
            return FollowsBy(told)
        except ValueError:
            raise UnsupportedModelError(
                f"{self.path} has a Markov head of the kind {str(told)[:100]}, which is not "
                f"computed; known are {', '.join(each.value for each in FollowsBy)}",
                remedy="Use another head.",
            ) from None

    def shapes(self, hidden_size: int, vocab_size: int, num_scored: int) -> Shapes:
        """Returns the shapes of all tensors that the head has to have. Raises ModelFileError for
        one without the parts that config.json states."""
        rank = self.rank
        shapes: Shapes = {}
        stated = self.values.get("markov_rank")
        if (AFTER in self.tensors or SCORED in self.tensors) or stated:
            if stated is not None and rank != stated:
                found = f"of rank {rank}" if rank else "missing"
                raise ModelFileError(
                    f"{self.path}: its Markov head is {found}, config.json states the rank "
                    f"{str(stated)[:20]}",
                    remedy="Download the head again.",
                )
            shapes = {AFTER: (vocab_size, rank), SCORED: (num_scored, rank)}
            joined = {
                FollowsBy.GATED: (rank, hidden_size + rank),
                FollowsBy.RECURRENT: (3 * rank, 2 * rank + hidden_size),
            }.get(self.kind)
            if joined is not None:
                name = _JOINED[self.kind]
                shapes |= {name + ".weight": joined, name + ".bias": joined[:1]}
        if self.has_confidence or self.values.get("enable_confidence_head"):
            read = hidden_size + (
                rank if self.values.get("confidence_head_with_markov", rank) else 0
            )
            shapes |= {_CONFIDENCE + ".weight": (1, read), _CONFIDENCE + ".bias": (1,)}
        return shapes

    @property
    def has_confidence(self) -> bool:
        return _CONFIDENCE + ".weight" in self.tensors

    def transitions(self) -> Transitions | None:
        """Returns None for a head without; its tensors have the right shapes."""
        if AFTER not in self.tensors:
            return None
        after, scored, kind = self.tensors[AFTER], self.tensors[SCORED], self.kind
        joined = None
        if kind in _JOINED:
            joined = (
                self._float32(_JOINED[kind] + ".weight"),
                self._float32(_JOINED[kind] + ".bias"),
            )
        return Transitions(
            kind,
            self.rank,
            lambda tokens: after.rows(tokens).float32(),
            lambda tokens: scored.rows(tokens).float32(),
            joined,
        )

    def confidence(self) -> Confidence | None:
        """See transitions."""
        if not self.has_confidence:
            return None
        weight, bias = (self._float32(f"{_CONFIDENCE}.{part}") for part in ("weight", "bias"))
        return Confidence(weight[0], float(bias[0]))

    def _float32(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()


def divided(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns the tensors of these parts, by their names of DeepSpec, and all others."""
    parts: dict[str, StoredTensor] = {}
    others: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.")
        if own.startswith(_PARTS):
            own = _ALSO.get(own, own.replace("confidence_proj.", _CONFIDENCE + "."))
            parts[own] = tensor
        else:
            others[own] = tensor
    return parts, others
