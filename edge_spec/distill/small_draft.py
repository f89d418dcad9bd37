"""An ordinary small draft: some of the target's own layers, between its own embedding and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from edge_spec.core.model_info import Checkpoint, TensorRows
from edge_spec.distill.small_draft_files import description, kept_layers, text_files
from edge_spec.distill.trainee import (
    DecoderLayers,
    Rotation,
    Teacher,
    Tensor,
    as_arrays,
    parameter,
    scored_rows,
)
from edge_spec.distill.windows import Batch

_EMBEDDING, _OUTPUT, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm"
_ROWS_AT_A_TIME = 256  # of scores over the whole vocabulary


class SmallDraftTrainee:
    """Layers and the final norm learn; the embedding and the output matrix stay the target's.

    A position is the next row of the same text, so a batch passes the layers once, whatever the
    number of positions. It learns over the scored tokens, and drafts from the whole vocabulary.
    """

    def __init__(
        self, teacher: Teacher, source: Checkpoint, num_layers: int, num_positions: int
    ) -> None:
        self.num_positions = num_positions
        self.num_layers = num_layers
        self._teacher = teacher
        self._source = source
        self.parameters = _beginning(source, kept_layers(teacher.config.num_layers, num_layers))
        self._embedding = torch.tensor(source.float32(_EMBEDDING))
        self._output = self._embedding
        if not teacher.config.tied_embeddings:
            self._output = torch.tensor(source.float32(_OUTPUT))
        self._rotation = Rotation(teacher.config)

    def scores(self, batch: Batch) -> list[Tensor]:
        wanted, rows = scored_rows(batch)
        logits = self._teacher.products.of(self._states(batch)[wanted], self._teacher.matrix)
        return [logits[each] for each in rows]

    def drafts(self, batch: Batch) -> np.ndarray:
        wanted, rows = scored_rows(batch)
        parts = self._states(batch)[wanted].split(_ROWS_AT_A_TIME)
        products = self._teacher.products
        output = products.rounded(self._output)
        best = torch.cat([products.of(each, output).argmax(dim=-1) for each in parts])
        drafts: np.ndarray = torch.stack([best[each] for each in rows], dim=1).cpu().numpy()
        return drafts

    def stored(self) -> dict[str, np.ndarray]:
        tensors = {_EMBEDDING: self._embedding.cpu().numpy()} | as_arrays(self.parameters)
        if self._output is not self._embedding:
            tensors[_OUTPUT] = self._output.cpu().numpy()
        return tensors

    def description(self) -> dict[str, Any]:
        return description(self._source, self.num_layers)

    def texts(self) -> Mapping[str, str]:
        return text_files(self._source)

    def _states(self, batch: Batch) -> Tensor:
        """[windows, rows + positions, hidden_size], after the final norm."""
        layers = DecoderLayers(self._teacher, self.parameters, self._rotation)
        stream = self._embedding[torch.as_tensor(batch.tokens)]
        positions = torch.arange(stream.shape[1])
        for layer in (f"model.layers.{number}" for number in range(self.num_layers)):
            read = layers.normed(stream, f"{layer}.input_layernorm")
            q, k, v = (layers.heads(read, layer, name, positions) for name in "qkv")
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).flatten(start_dim=2)
            stream = layers.after_attention(stream, mixed, layer)
        return layers.normed(stream, _NORM)


def _beginning(source: TensorRows, layers: Mapping[int, int]) -> dict[str, Tensor]:
    """The target's own tensors, under the numbers that its layers have in the draft."""
    norm = _NORM + ".weight"
    found = {norm: parameter(source.float32(norm))}
    for name in source.names():
        parts = name.split(".", 3)
        if parts[:2] == ["model", "layers"] and int(parts[2]) in layers:
            own = f"model.layers.{layers[int(parts[2])]}.{parts[3]}"
            found[own] = parameter(source.float32(name))
    return found
