"""SmolLM3: no positions in every fourth layer (Yang et al. 2025, "Rope to Nope and Back Again")."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.layer_kind import LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.layers import MAX_LAYERS, of_types
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata

_INTERVAL = 4


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    if values.get("use_sliding_window"):
        raise stated.refuse("a sliding window")
    rotates = values.get("no_rope_layers")  # 1: this layer does
    if rotates is None:
        interval = int(values.get("no_rope_layer_interval", _INTERVAL))
        rotates = _all_but_last_of(interval, int(values["num_hidden_layers"]))
    return _fields(stated.rope(), [bool(each) for each in rotates])


def _of_metadata(stated: StatedMetadata) -> Fields:
    return _fields(stated.rope(), _all_but_last_of(_INTERVAL, stated.num_layers))


def _all_but_last_of(interval: int, num_layers: int) -> list[bool]:
    return [(layer + 1) % interval != 0 for layer in range(min(num_layers, MAX_LAYERS))]


def _fields(rope: Rope, rotates: Sequence[bool]) -> Fields:
    kinds = {"rope": LayerKind(rope), "none": LayerKind(None)}
    return of_types(kinds, ["rope" if each else "none" for each in rotates])


SMOLLM3 = Family(
    model_types=("smollm3",),
    architectures=("smollm3",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    is_permuted=True,
)
