"""Compose a pair bundle of exporters' output, in formats and quantizations for a kind of device.
Each choice names its reason, with a reference; none rests on an unmeasured rate."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.core.model_info import Checkpoint
from edge_spec.errors import (
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import (
    MAX_TEXT_CHARACTERS,
    ROLES,
    TOKENIZER,
    Member,
    PairManifest,
    Variant,
    VocabularyProof,
    list_files,
    may_replace,
    read_manifest,
    require_readable,
    write_listing,
)
from edge_spec.models.model_plan import joined_types
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_directory, sha256_file
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import Vocabulary, compare, require_same_vocabulary

ALL_FORMATS = ("onnx", "gguf", "coreml")
_IDLE = (
    "the NPU stays idle without --compile, which adds a binary for the one of a processor; CPU and "
    "GPU run these"
)
# Default processor for a kind's binary.
_SOCS: Mapping[str, str] = {"windows-npu": "SC8380XP", "android": "SM8650"}
_FIXED = ("coreai", "coreml", "onnx-static")  # with fixed shapes
_OWN_OPTIONS = {"context_length": _FIXED, "hidden_states": _FIXED}


@dataclass(frozen=True)
class ExportChoice:
    """One format. quantization, compute: None: the exporter chooses. is_required: fail without its
    exporter, as for a requested format. role: for this model only."""

    format: str
    quantization: str | None
    why: str
    compute: str | None = None
    is_required: bool = False
    role: str | None = None


@dataclass(frozen=True)
class ExportChoices:
    """The formats to write. kind: of device; formats that cannot be written here are left out.
    None: the user named the formats, and all or none are written."""

    choices: tuple[ExportChoice, ...]
    kind: str | None = None
    notes: tuple[str, ...] = ()  # what that kind of device lacks

    @property
    def formats(self) -> set[str]:
        return {choice.format for choice in self.choices}

    def of(self, role: str) -> list[ExportChoice]:
        return [choice for choice in self.choices if choice.role in (None, role)]


_COREML_GPU = ExportChoice(
    "coreml",
    "int4",
    "for the GPU: from iOS 18 and macOS 15 on, Core ML reads 4-bit weights with a scale a block "
    "(coremltools, What's New)",
    "gpu",
    role=ROLES[0],
)
_COREML_ANE = ExportChoice(
    "coreml",
    "lut6",
    "for the Neural Engine, which has lookup tables but no scales a block (ANEMLL), beside a "
    "target on the GPU",
    "ane",
    role=ROLES[1],
)
_COREAI = ExportChoice(
    "coreai",
    "int8",
    "asked for, for iOS and macOS 27: of its block formats, the one that loses least; an app "
    "chooses the unit as it loads it",
    is_required=True,
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

_KINDS: Mapping[str, tuple[ExportChoice, ...]] = {
    "ios": (_COREML_GPU, _COREML_ANE, _METAL),
    "macos": (_COREML_GPU, _COREML_ANE, _METAL, _ONNX),
    "windows-npu": (_ONNX, _REPACKED),
    "android": (_REPACKED, _ONNX),
    "linux": (_ONNX, _REPACKED),
}
KINDS = tuple(_KINDS)
_WITH_CORE_AI = ("ios", "macos")


def choices_for(
    kind: str, compiles: bool = False, soc: str | None = None, format: str | None = None
) -> ExportChoices:
    """Return the formats for a kind of device. compiles: first a binary for Qualcomm's NPU. soc:
    its processor; None: the kind's usual one. format: only Core AI, which no kind has by default.
    Raises UsageError that lists the valid kinds."""
    if kind not in _KINDS:
        raise UsageError(
            f"there is no kind of device called {kind!r}",
            remedy=f"Choose one of {', '.join(KINDS)}.",
        )
    if compiles and kind not in _SOCS:
        raise UsageError(
            f"nothing is compiled for {kind}",
            remedy=f"--compile goes with --for {' or '.join(sorted(_SOCS))}.",
        )
    if format is not None:
        if format == _COREAI.format and kind in _WITH_CORE_AI:
            return ExportChoices((_COREAI,), kind)
        other = f", or give --format {_COREAI.format}" if kind in _WITH_CORE_AI else ""
        raise UsageError(f"--for {kind} chooses the formats", remedy=f"Leave --format out{other}.")
    if not compiles:
        return ExportChoices(_KINDS[kind], kind, (_IDLE,) if kind in _SOCS else ())
    binary = ExportChoice(
        "qnn",
        "int4",
        "for the NPU, whose compiler multiplies by 4-bit blocks as they are stored",
        soc or _SOCS[kind],
        is_required=True,
    )
    return ExportChoices((binary, *_KINDS[kind]), kind)


def named_formats(formats: Sequence[str]) -> ExportChoices:
    """Return these formats, with default quantizations. Raises UsageError for a repeated name."""
    if len(set(formats)) < len(formats):
        raise UsageError(f"{','.join(formats)} names a format twice", remedy="Name each once.")
    return ExportChoices(tuple(ExportChoice(format, None, "asked for") for format in formats))


def with_quantizations(choices: ExportChoices, asked: str | None) -> ExportChoices:
    """Replace quantizations. asked: FORMAT=NAME, joined by commas. Raises UsageError for another
    form or format."""
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

    changed = (
        replace(choice, quantization=names[choice.format], why="asked for")
        if choice.format in names
        else choice
        for choice in choices.choices
    )
    return replace(choices, choices=tuple(changed))


@dataclass(frozen=True)
class PairPart:
    """A model of a pair, or its first layers."""

    source: Source
    num_layers: int | None = None  # None: all

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Opened with weights unread. Raises UsageError for too many layers, and as `Source.path`
        and `open_checkpoint` do."""
        checkpoint = runtimes.open_checkpoint(self.source.path)
        found = checkpoint.config.num_layers
        if self.num_layers is not None and not 1 <= self.num_layers <= found:
            raise UsageError(
                f"{self.source.name} has {found} layers, {self.num_layers} are asked for",
                remedy=f"Choose 1 to {found}.",
            )
        return checkpoint

    @property
    def kept_layers(self) -> int:
        return self.num_layers or self.checkpoint.config.num_layers

    @property
    def name(self) -> str:
        name = "".join("_" if c in "/\\:" or c < " " else c for c in self.source.name)[:150]
        return name if self.num_layers is None else f"{name}-{self.num_layers}-layers"

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return Tokenizer(self.checkpoint.tokenizer_json()).vocabulary()


def export_pair(
    target: PairPart,
    draft: PairPart | None,
    choices: ExportChoices,
    out: Path,
    progress: Progress,
    options: ExportOptions = ExportOptions(),  # noqa: B008
) -> PairManifest:
    """Write a pair bundle to `out`, with choices, omissions and reasons in its manifest.

    options: those of a single format, such as a context, go to that format; others but `check` are
    ignored. Raises UsageError if `out` must not be replaced, the draft has other tokens or all of
    the target's layers, or no format has an option; what exporters raise; ExportError if nothing
    could be written of a model. `out` is unchanged after an error or interrupt.
    """
    out = out.absolute()
    if out.exists() and not may_replace(out, PairManifest):
        raise UsageError(
            f"{out} exists and is no pair bundle, or has more in it",
            remedy="Choose an empty or new directory.",
        )
    require_readable(out)
    _require_options(choices, options)
    if draft and draft.source == target.source and draft.kept_layers >= target.kept_layers:
        raise UsageError(
            f"the draft would be {target.source.name} itself, with all of its "
            f"{target.kept_layers} layers",
            remedy="Choose a smaller --draft, or fewer --draft-layers.",
        )
    parts = {ROLES[0]: target}
    proof = None
    if draft is not None:
        parts[ROLES[1]] = draft
        proof = _prove_vocabulary(target, draft)
    template = target.checkpoint.chat_template
    notes = list(choices.notes)
    with atomic_directory(out) as work:
        (work / TOKENIZER).write_text(target.checkpoint.tokenizer_json(), encoding="utf-8")
        written = {
            role: _write(role, part, choices, options, work, progress, notes)
            for role, part in parts.items()
        }
        formats = {format for member in written.values() for format in member.formats}
        manifest = PairManifest(
            name=target.name,
            kind=choices.kind,
            notes=tuple(notes),
            target=written[ROLES[0]],
            draft=written.get(ROLES[1]),
            tokenizer=list_files(work, work / TOKENIZER)[TOKENIZER],
            chat_template_sha256=template and hashlib.sha256(template.encode()).hexdigest(),
            vocabulary=proof,
            versions=runtimes.writer_versions(sorted(formats)),
        )
        write_listing(work, manifest)
    return manifest


def _require_options(choices: ExportChoices, options: ExportOptions) -> None:
    for option, owners in _OWN_OPTIONS.items():
        if getattr(options, option) and choices.formats.isdisjoint(owners):
            raise UsageError(
                f"none of {', '.join(sorted(choices.formats))} has an option "
                f"{option.replace('_', '-')}",
                remedy="Leave it out.",
            )
    for format in sorted(choices.formats) if choices.kind is None else ():
        runtimes.load_exporter(format)  # raises for an unknown name or a missing library


def _prove_vocabulary(target: PairPart, draft: PairPart) -> VocabularyProof:
    """Raises UsageError that lists the first differing tokens."""
    require_same_vocabulary(target.vocabulary, draft.vocabulary, target.name, draft.name)
    first, second = Vocabulary.of(target.vocabulary), Vocabulary.of(draft.vocabulary)
    return VocabularyProof(
        target_sha256=first.sha256,
        target_size=first.size,
        draft_sha256=second.sha256,
        draft_size=second.size,
        num_shared=compare(target.vocabulary, draft.vocabulary).num_shared,
    )


def _write(
    role: str,
    part: PairPart,
    choices: ExportChoices,
    options: ExportOptions,
    work: Path,
    progress: Progress,
    notes: list[str],
) -> Member:
    """Raises ExportError if all formats are omitted; each leaves a note."""

    def say(what: str, fraction: float) -> None:
        progress(f"{role.capitalize()}: {what}", fraction)

    variants = []
    for choice in choices.of(role):
        try:
            variants.append(_write_variant(role, part, choice, options, work, say))
        except (MissingDependencyError, UnsupportedModelError) as error:
            is_missing = isinstance(error, MissingDependencyError)
            if choices.kind is None or (is_missing and choice.is_required):
                raise
            shutil.rmtree(work / role / choice.format, ignore_errors=True)
            notes.append(f"{role} {choice.format} is left out: {error}"[:MAX_TEXT_CHARACTERS])
    if not variants:
        raise ExportError(
            f"the {role} could not be written for {choices.kind}: {'; '.join(notes)}",
            remedy="Choose another model or --for another kind of device.",
        )
    path = part.checkpoint.path
    return Member(
        name=part.name,
        num_layers=part.kept_layers,
        source_sha256=sha256_file(path) if path.is_file() else None,
        variants=tuple(variants),
    )


def _write_variant(
    role: str, part: PairPart, choice: ExportChoice, asked: ExportOptions, work: Path, say: Progress
) -> Variant:
    options = ExportOptions(
        quantization=choice.quantization,
        num_layers=part.num_layers,
        check=asked.check,
        compute=choice.compute,
    )
    for option, owners in _OWN_OPTIONS.items():
        if choice.format in owners:
            options = replace(options, **{option: getattr(asked, option)})
    is_file, path = choice.format == "gguf", f"{role}/{choice.format}"
    if is_file:
        (work / path).mkdir(parents=True)
        path += "/model.gguf"
    exporter = runtimes.load_exporter(choice.format)
    report = exporter.export(part.checkpoint, work / path, options, say)
    if is_file:
        stored = joined_types(runtimes.open_model_info(work / path).weight_types)
    else:
        stored = read_manifest(work / path).quantization
    return Variant(
        format=choice.format,
        quantization=stored,
        compute=choice.compute,
        path=path,
        parity=report.parity,
        why=choice.why,
        files=list_files(work, work / path),
    )
