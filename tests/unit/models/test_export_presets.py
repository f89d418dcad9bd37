"""What a kind of device is given, and how --quant names formats."""

from __future__ import annotations

import pytest

from edge_spec.errors import UsageError
from edge_spec.models.bundle import ROLES
from edge_spec.models.pair_export import (
    ALL_FORMATS,
    KINDS,
    choices_for,
    with_quantizations,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_a_quantization_and_a_reason_for_each_format(kind: str) -> None:
    choices = choices_for(kind)
    assert choices.kind == kind
    for chosen in map(choices.of, ROLES):
        formats = [choice.format for choice in chosen]
        assert len(set(formats)) == len(formats) and set(formats) <= set(ALL_FORMATS)
        assert all(choice.quantization and len(choice.why) > 20 for choice in chosen)


def test_a_binary_is_for_the_processor_that_is_named_or_the_usual_one() -> None:
    made = choices_for("windows-npu", compiles=True)
    for chosen in map(made.of, ROLES):
        assert (chosen[0].format, chosen[0].compute) == ("qnn", "SC8380XP")
    assert made.notes == ()
    named = choices_for("android", compiles=True, soc="SM8750")
    assert [choice.compute for choice in named.of("draft")] == ["SM8750", None, None]
    assert with_quantizations(named, "qnn=fp16").of("target")[0].quantization == "fp16"
    with pytest.raises(UsageError, match=r"for ios\. --compile goes with --for android or windows"):
        choices_for("ios", compiles=True)


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'vax'.*ios, macos, windows-npu, android, linux"):
        choices_for("vax")


@pytest.mark.parametrize("kind", ["ios", "macos"])
def test_core_ai_is_written_alone_where_it_is_asked_for(kind: str) -> None:
    made = with_quantizations(choices_for(kind, format="coreai"), "coreai=int4")
    for chosen in map(made.of, ROLES):
        assert [(choice.format, choice.quantization) for choice in chosen] == [("coreai", "int4")]
    assert made.kind == kind and "coreai" not in choices_for(kind).formats


@pytest.mark.parametrize("asked", ["int4", "coreml=int4", "onnx=", "onnx=int4,onnx=int8", ","])
def test_a_quantization_that_names_no_format_of_the_pair_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="FORMAT=NAME"):
        with_quantizations(choices_for("linux"), asked)
