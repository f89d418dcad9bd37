"""The tensors of a head's experts: of all at once as files have them, and of each as heads do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import HeadExperts
from edge_spec.errors import ModelFileError
from edge_spec.exporters.stored_tensor import StoredTensor

_ALL = re.compile(r"(layers\.\d+\.experts\.)([a-z_]+)\.weight")
_SHARED_GATE = "shared_gate.weight"


def each_expert(
    path: Path, named: Mapping[str, StoredTensor], experts: HeadExperts
) -> dict[str, StoredTensor]:
    """Returns the tensors by names of ours, those of each expert apart. Raises ModelFileError for
    those of all at once that are of another shape."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in named.items():
        every = _ALL.fullmatch(name)
        if every is not None:
            found |= _apart(path, every[1], every[2], tensor, experts)
        elif name.endswith(_SHARED_GATE) and len(tensor.shape) == 1:  # as GGUF has it
            found[name] = replace(tensor, shape=(1, *tensor.shape), data=tensor.data[None])
        else:
            found[name] = tensor
    return found


def expert_shapes(
    config: ModelConfig, experts: HeadExperts, prefix: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields what a layer with experts has beside its own MLP."""
    hidden = config.hidden_size
    yield prefix + "router.weight", (experts.count, hidden)
    yield prefix + _SHARED_GATE, (1, hidden)
    for expert in range(experts.count):
        own = f"{prefix}experts.{expert}."
        yield own + "gate.weight", (experts.size, hidden)
        yield own + "up.weight", (experts.size, hidden)
        yield own + "down.weight", (hidden, experts.size)


def _apart(
    path: Path, prefix: str, part: str, tensor: StoredTensor, experts: HeadExperts
) -> Iterator[tuple[str, StoredTensor]]:
    if len(tensor.shape) != 3 or tensor.shape[0] != experts.count:
        raise ModelFileError(
            f"{path}: the matrices of its experts have the shape {list(tensor.shape)}, expected "
            f"{experts.count} of them",
            remedy="Download the model again.",
        )
    parts = {"gate": slice(experts.size), "up": slice(experts.size, None)}
    for expert in range(experts.count):
        own = replace(tensor, shape=tensor.shape[1:], data=tensor.data[expert])
        if part == "gate_up":
            for name, rows in parts.items():
                yield f"{prefix}{expert}.{name}.weight", own.rows(rows)
        else:
            yield f"{prefix}{expert}.{part}.weight", own
