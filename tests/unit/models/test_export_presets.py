"""What a kind of device is given, and how --quant names formats."""

from __future__ import annotations

import pytest

from edge_spec.errors import UsageError
from edge_spec.models.export_presets import (
    ALL_FORMATS,
    KINDS,
    choices_for,
    compiled_choices,
    named_formats,
    with_quantizations,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_a_quantization_and_a_reason_for_each_format(kind: str) -> None:
    choices = choices_for(kind)
    assert choices.kind == kind
    for chosen in (choices.target, choices.draft):
        formats = [choice.format for choice in chosen]
        assert len(set(formats)) == len(formats) and set(formats) <= set(ALL_FORMATS)
        assert all(choice.quantization and len(choice.why) > 20 for choice in chosen)


@pytest.mark.parametrize("kind", ["ios", "macos"])
def test_apples_draft_is_laid_out_for_the_neural_engine_and_its_target_for_the_gpu(
    kind: str,
) -> None:
    choices = choices_for(kind)
    units = [
        {choice.compute for choice in chosen if choice.format == "coreml"}
        for chosen in (choices.target, choices.draft)
    ]
    assert units == [{"gpu"}, {"ane"}]


def test_core_ml_is_for_apple_alone_and_the_idle_npu_is_admitted() -> None:
    for kind in ("windows-npu", "android", "linux"):
        assert choices_for(kind).formats == {"onnx", "gguf"}
    for kind in ("windows-npu", "android"):
        assert "NPU stays idle without --compile" in choices_for(kind).notes[0]


def test_a_binary_is_for_the_processor_that_is_named_or_the_usual_one() -> None:
    made = compiled_choices(choices_for("windows-npu"), None)
    for chosen in (made.target, made.draft):
        assert (chosen[0].format, chosen[0].compute) == ("qnn", "SC8380XP")
    assert made.notes == ()
    named = compiled_choices(choices_for("android"), "SM8750")
    assert [choice.compute for choice in named.draft] == ["SM8750", None, None]
    assert with_quantizations(named, "qnn=fp16").target[0].quantization == "fp16"
    with pytest.raises(UsageError, match=r"for ios\. --compile goes with --for android or windows"):
        compiled_choices(choices_for("ios"), None)


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'vax'.*ios, macos, windows-npu, android, linux"):
        choices_for("vax")


def test_named_formats_are_left_to_their_exporters_defaults() -> None:
    choices = named_formats(["onnx", "gguf"])
    assert choices.target == choices.draft and choices.kind is None
    assert [choice.quantization for choice in choices.target] == [None, None]
    with pytest.raises(UsageError, match="names a format twice"):
        named_formats(["onnx", "onnx"])


def test_a_quantization_changes_its_format_in_both_models() -> None:
    choices = with_quantizations(choices_for("linux"), "gguf=Q8_0")
    for chosen in (choices.target, choices.draft):
        found = {choice.format: choice.quantization for choice in chosen}
        assert found == {"onnx": "int4", "gguf": "Q8_0"}


@pytest.mark.parametrize("asked", ["int4", "coreml=int4", "onnx=", "onnx=int4,onnx=int8", ","])
def test_a_quantization_that_names_no_format_of_the_pair_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="FORMAT=NAME"):
        with_quantizations(choices_for("linux"), asked)
