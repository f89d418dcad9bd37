"""A model's description says in a file what the model has, and nothing of what it has not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Encoder, Experts, LayerKind
from edge_spec.core.rope import Rope, RopeScaling

PLAIN = ModelConfig("llama", 2, 8, 8, 2, 1, 4, 265, 128, 1e-5, 1e4)
SCALED = Rope(1e4, RopeScaling("factors", factors=(1.0, 2.0), magnitude=1.5))
OTHER = replace(
    PLAIN,
    rope_scaling=RopeScaling("linear", 2.0),
    layer_kinds=(LayerKind(SCALED, 8), LayerKind(None, convolution=3)),
    kind_of_layer=(0, 1),
    experts=Experts(sigmoid=True),
    encoder=Encoder(2, 0),
)


@pytest.mark.parametrize("config", [PLAIN, OTHER])
def test_what_is_written_is_read_back(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_what_a_model_has_not_is_left_out() -> None:
    assert list(PLAIN.to_dict())[-1] == "experts_used" and PLAIN.to_dict()["rope_scaling"] is None
    written = OTHER.to_dict()
    assert OTHER.features().keys() == written.keys() - PLAIN.to_dict().keys()
    assert "magnitude" not in written["rope_scaling"]
    windowed, convolving = written["layer_kinds"]
    assert windowed.keys() == {"rope", "window"}
    assert windowed["rope"]["scaling"]["magnitude"] == 1.5
    assert convolving == {"rope": None, "window": None, "convolution": 3}
    assert written["experts"].keys() == {"normalized", "biases", "clamp", "sigmoid"}


@pytest.mark.parametrize("wrong", [{"strange": 1}, {"experts": {"strange": 1}}, {"encoder": 5}])
def test_what_is_no_description_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        ModelConfig.from_dict(PLAIN.to_dict() | wrong)
