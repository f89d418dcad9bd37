"""Chooses formats and quantizations for a kind of device, and states the reason of each.

A reason names what reads the format and where that can be looked up; none rests on a rate that was
not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edge_spec.errors import UsageError

ALL_FORMATS = ("onnx", "gguf", "coreml")


@dataclass(frozen=True)
class ExportChoice:
    """One format. None leaves the quantization, or the unit it is laid out for, to its exporter.

    is_required: of a format whose exporter must be installed, as what was asked for by name.
    """

    format: str
    quantization: str | None
    why: str
    compute: str | None = None
    is_required: bool = False


@dataclass(frozen=True)
class ExportChoices:
    """Lists what is written of each model.

    kind: of device that they are for; then a format that cannot be written here is left out. None:
    the user named the formats, and all of them are written or none.
    """

    target: tuple[ExportChoice, ...]
    draft: tuple[ExportChoice, ...]
    kind: str | None = None
    notes: tuple[str, ...] = ()  # what that kind of device does without

    @property
    def formats(self) -> set[str]:
        return {choice.format for choice in self.target + self.draft}


_COREML_GPU = ExportChoice(
    "coreml",
    "int4",
    "for the GPU: from iOS 18 and macOS 15 on, Core ML reads 4-bit weights with a scale a block "
    "(coremltools, What's New)",
    "gpu",
)
_COREML_ANE = ExportChoice(
    "coreml",
    "lut6",
    "for the Neural Engine, which has lookup tables but no scales a block (ANEMLL), beside a "
    "target on the GPU",
    "ane",
)
_METAL = ExportChoice("gguf", "Q4_0", "what apps with llama.cpp read, whose Metal kernels know it")
_REPACKED = ExportChoice(
    "gguf",
    "Q4_0",
    "llama.cpp lays it out again at load for dot-product instructions, ARM's or AVX2's",
)
_ONNX = ExportChoice(
    "onnx", "int4", "onnxruntime multiplies by 4-bit weights as they are stored (MatMulNBits)"
)

_IDLE = (
    "the NPU stays idle without --compile, which adds a binary for the one of a processor; CPU and "
    "GPU run these"
)
# The processor that a kind's binary is for, where none is named.
_SOCS: Mapping[str, str] = {"windows-npu": "SC8380XP", "android": "SM8650"}
_KINDS: Mapping[str, ExportChoices] = {
    "ios": ExportChoices((_COREML_GPU, _METAL), (_COREML_ANE, _METAL)),
    "macos": ExportChoices((_COREML_GPU, _METAL, _ONNX), (_COREML_ANE, _METAL, _ONNX)),
    "windows-npu": ExportChoices((_ONNX, _REPACKED), (_ONNX, _REPACKED), notes=(_IDLE,)),
    "android": ExportChoices((_REPACKED, _ONNX), (_REPACKED, _ONNX), notes=(_IDLE,)),
    "linux": ExportChoices((_ONNX, _REPACKED), (_ONNX, _REPACKED)),
}
KINDS = tuple(_KINDS)


def choices_for(kind: str) -> ExportChoices:
    """Raises UsageError that lists the kinds there are."""
    if kind not in _KINDS:
        raise UsageError(
            f"there is no kind of device called {kind!r}",
            remedy=f"Choose one of {', '.join(KINDS)}.",
        )
    return replace(_KINDS[kind], kind=kind)


def compiled_choices(choices: ExportChoices, soc: str | None) -> ExportChoices:
    """Adds, first of all, a binary for Qualcomm's NPU. soc: of which processor; None: the usual one
    of the kind. Raises UsageError for a kind of device that has none."""
    if choices.kind is None or choices.kind not in _SOCS:
        raise UsageError(
            f"nothing is compiled for {choices.kind}",
            remedy=f"--compile goes with --for {' or '.join(sorted(_SOCS))}.",
        )
    binary = ExportChoice(
        "qnn",
        "int4",
        "for the NPU, whose compiler multiplies by 4-bit blocks as they are stored",
        soc or _SOCS[choices.kind],
        is_required=True,
    )
    notes = tuple(note for note in choices.notes if note != _IDLE)
    return replace(
        choices, target=(binary, *choices.target), draft=(binary, *choices.draft), notes=notes
    )


def named_formats(formats: Sequence[str]) -> ExportChoices:
    """These formats in their default quantizations. Raises UsageError for a name given twice."""
    if len(set(formats)) < len(formats):
        raise UsageError(f"{','.join(formats)} names a format twice", remedy="Name each once.")
    chosen = tuple(ExportChoice(format, None, "asked for") for format in formats)
    return ExportChoices(chosen, chosen)


def with_quantizations(choices: ExportChoices, asked: str | None) -> ExportChoices:
    """asked: FORMAT=NAME, joined by commas, for target and draft alike.

    Raises UsageError for any other form, and for a format that is not written.
    """
    names = {}
    for part in asked.split(",") if asked else ():
        format, _, name = (piece.strip() for piece in part.partition("="))
        if format not in choices.formats or not name or format in names:
            raise UsageError(
                f"--quant {asked} does not say which format gets what",
                remedy="With several formats, write FORMAT=NAME for each that is to differ, such "
                f"as --quant {sorted(choices.formats)[0]}=NAME.",
            )
        names[format] = name

    def changed(chosen: tuple[ExportChoice, ...]) -> tuple[ExportChoice, ...]:
        return tuple(
            replace(each, quantization=names[each.format], why="asked for")
            if each.format in names
            else each
            for each in chosen
        )

    return replace(choices, target=changed(choices.target), draft=changed(choices.draft))
