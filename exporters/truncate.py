"""A model's first layers alone: a draft that needs no training, if a poor one."""

from __future__ import annotations

from dataclasses import replace

from edge_spec.errors import UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint


def first_layers(checkpoint: StoredCheckpoint, num_layers: int) -> StoredCheckpoint:
    """The checkpoint without the layers from `num_layers` on; embedding, norm and head stay.

    Raises UsageError unless it has that many, one with attention among them.
    """
    config = checkpoint.config
    least = config.attending[0] + 1  # without attention nothing tells how long a text is
    if not least <= num_layers <= config.num_layers:
        raise UsageError(
            f"{checkpoint.path} has {config.num_layers} layers, {num_layers} are asked for",
            remedy=f"Choose {least} to {config.num_layers}.",
        )
    if config.layer_embeddings is not None:
        raise UsageError(
            f"{checkpoint.path} has embeddings of its layers, which stand in one table",
            remedy="Convert all of its layers.",
        )
    prefixes = tuple(f"model.layers.{layer}." for layer in range(num_layers, config.num_layers))
    tensors = {
        name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(prefixes)
    }
    shorter = replace(
        config,
        num_layers=num_layers,
        kind_of_layer=config.kind_of_layer[:num_layers],
        kv_sources=config.kv_sources[:num_layers],
        intermediate_sizes=config.intermediate_sizes[:num_layers],
    )
    return replace(checkpoint, config=shorter, tensors=tensors)
