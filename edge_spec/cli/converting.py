"""`edge-spec pull` and `export`: models from the hub, and bundles in other formats."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_result
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import option

if TYPE_CHECKING:
    from edge_spec.core.export import ExportOptions
    from edge_spec.models.bundle import PairManifest
    from edge_spec.models.hub import HubReference
    from edge_spec.models.hub_download import HubModel
    from edge_spec.models.pair_export import ExportChoices


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="hf:org/name, and after it @revision or :file.gguf.", show_default=False
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Fetch this smaller model, too; auto: one known for the family.", metavar="TEXT"
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Fetch a model from the Hugging Face hub.

    Print where it is. What is here already is not fetched again; an interrupted download goes on.
    """
    from edge_spec.models.hub import HubReference
    from edge_spec.models.hub_download import pull as fetch

    reference = HubReference.parse(model)
    smaller = None if draft in (None, "none") else _draft(reference, draft)
    with ProgressBar() as progress:
        fetched = fetch(reference, progress)
        drafting = None if smaller is None else fetch(smaller, progress)
    found = [fetched] if drafting is None else [fetched, drafting]
    document = {}
    if json:  # hashing reads whole files
        document = _document(fetched) | {"draft": drafting and _document(drafting)}
    print_result(json, document, (str(each.path) for each in found))


def _draft(target: HubReference, draft: str) -> HubReference | None:
    from edge_spec.models.hub import PREFIX, HubReference, known_draft

    if draft != "auto":
        return HubReference.parse(draft)
    found = known_draft(target.repository)
    if found is not None:
        return HubReference.parse(PREFIX + found)
    told = f"no smaller model of the family of {target} is known: name one with --draft"
    print(f"note: {told}", file=sys.stderr)
    return None


def _document(model: HubModel) -> dict[str, Any]:
    from edge_spec.storage.measurements import known_sha256

    files = [
        {"name": name, "num_bytes": path.stat().st_size, "sha256": known_sha256(path)}
        for name, path in model.files.items()
    ]
    return {
        "model": str(model.reference),
        "path": str(model.path),
        "revision": model.commit,
        "files": files,
        "num_bytes": sum(file["num_bytes"] for file in files),
    }


_PAIR = "Pair bundles"
_SINGLE = "onnx"  # the default format
_COMPILED = "qnn"  # the only format compiled for a single processor


@dataclass(frozen=True)
class AskedExport:
    format: str | None = option(
        None,
        "onnx, gguf, coreml, coreai, onnx-static: onnx of fixed shapes, qnn: compiled for "
        "Qualcomm's NPU (--soc), or optimum: onnx of other architectures; all, or several "
        f"joined by commas, for a pair bundle.  [default: {_SINGLE}]",
    )
    quant: str | None = option(
        None,
        "onnx: int4, int8, fp16, fp32 (default int4); onnx-static: the same (default "
        "fp16); optimum: int4, int8, fp32 (default "
        "int4); gguf: Q4_0, Q8_0, Q4_K_M, F16 and others (default Q4_K_M); coreml: int4, int8, "
        "fp16 for the GPU (default int4), lut4, lut6, fp16 for the Neural Engine (default "
        "lut6); coreai: int8, int4, fp32 (default int8). For a pair bundle FORMAT=NAME, several "
        "joined by commas.",
    )
    layers: int | None = option(None, "Keep only the first layers, for a draft.")
    compute: str | None = option(
        None, "coreml: the unit to lay the graph out for, gpu or ane.  [default: gpu]"
    )
    context: int | None = option(
        None, "coreai, coreml, onnx-static: tokens that the cache holds.  [default: up to 2048]"
    )
    compile: bool = option(
        False,
        "With --for android or windows-npu: also a binary for Qualcomm's NPU.",
        _PAIR,
        flag="--compile",
    )
    soc: str | None = option(
        None,
        "qnn: the processor to compile for, such as SM8650.  [default: of --for android "
        "SM8650, of windows-npu SC8380XP]",
    )
    hidden_states: bool = option(
        False, "coreai, coreml, onnx-static: return them beside the scores.", flag="--hidden-states"
    )
    draft: str | None = option(None, "A smaller model that drafts for it.", _PAIR)
    draft_layers: int | None = option(
        None, "Only the draft's first layers; without --draft, the model's own.", _PAIR
    )
    kind: str | None = option(
        None,
        "Formats and quantizations for ios, macos, windows-npu, android or linux; for ios and "
        "macos with --format coreai: Core AI.",
        _PAIR,
        flag="--for",
    )
    check: bool = option(True, "Compare the result with the reference model.")

    def options(self, quantization: str | None, compute: str | None) -> ExportOptions:
        from edge_spec.core.export import ExportOptions

        return ExportOptions(
            quantization,
            self.layers,
            self.check,
            compute,
            self.context,
            self.hidden_states,
        )


def export(
    model: options.NamedModel,
    out: Annotated[
        Path,
        typer.Argument(help="Directory to write, or the file of a GGUF.", show_default=False),
    ],
    *,
    asked: AskedExport,
    json: options.Json = False,
) -> None:
    """Convert a model, or a model and its draft, into another format.

    `chat` and `generate` open the result directly.
    """
    choices = _choices(asked)
    if choices is not None:
        _export_pair(model, out, choices, asked, json)
    elif asked.draft is None and asked.draft_layers is None:
        _export_one(model, out, asked, json)
    else:
        raise UsageError("a draft goes into a pair bundle", remedy="Add --format all, or --for.")


def _choices(asked: AskedExport) -> ExportChoices | None:
    """Return the choices for a pair bundle, or None for a single format. Raises UsageError."""
    from edge_spec.models.pair_export import (
        ALL_FORMATS,
        choices_for,
        named_formats,
        with_quantizations,
    )

    format = asked.format
    if asked.soc is not None and not asked.compile and format != _COMPILED:
        raise UsageError(
            "--soc is of what is compiled", remedy=f"Add --compile, or --format {_COMPILED}."
        )
    if asked.soc is not None and asked.compute is not None:
        raise UsageError("--soc and --compute name two units", remedy="Leave one out.")
    if asked.kind is not None:
        only = None if format == "all" else format
        choices = choices_for(asked.kind, asked.compile, asked.soc, only)
        return with_quantizations(choices, asked.quant)
    if asked.compile:
        raise UsageError(
            "--compile is for a kind of device",
            remedy="Add --for android or windows-npu, or write one model with --format qnn.",
        )
    formats = ALL_FORMATS if format == "all" else tuple((format or _SINGLE).split(","))
    return None if len(formats) == 1 else with_quantizations(named_formats(formats), asked.quant)


def _export_one(model: str, out: Path, asked: AskedExport, as_json: bool) -> None:
    from edge_spec.models import runtimes
    from edge_spec.models.source import Source

    how = asked.options(asked.quant, asked.soc or asked.compute)
    with ProgressBar() as progress:
        exporter = runtimes.load_exporter(asked.format or _SINGLE)
        source = runtimes.open_exportable(exporter, Source(model, progress).path)
        report = exporter.export(source, out, how, progress)
    lines = [f"{report.path}: {report.num_bytes / 1e6:.1f} MB", *report.notes]
    if report.parity:
        lines.append(
            "against the reference: perplexity {source_perplexity:.3f} -> {perplexity:.3f}, "
            "KL divergence {kl_divergence:.4f}, largest logit difference "
            "{max_logit_difference:.3g}".format(**report.parity)
        )
    written = {"path": str(report.path), "num_bytes": report.num_bytes, "notes": report.notes}
    print_result(as_json, {**written, **report.parity}, lines)


def _export_pair(
    model: str, out: Path, choices: ExportChoices, asked: AskedExport, as_json: bool
) -> None:
    from edge_spec.models.pair_export import PairPart, export_pair
    from edge_spec.models.source import Source

    if asked.compute is not None:
        raise UsageError(
            "--compute is for one model: those of a pair are laid out for units of their own",
            remedy="Leave it out, or choose both with --for.",
        )
    with ProgressBar() as progress:
        target, draft = PairPart(Source(model, progress), asked.layers), None
        if asked.draft not in (None, "none") or asked.draft_layers is not None:
            smaller = model if asked.draft is None else asked.draft
            draft = PairPart(Source(smaller, progress), asked.draft_layers)
        how = asked.options(None, None)
        manifest = export_pair(target, draft, choices, out, progress, how)
    _print_pair(manifest, out.absolute(), as_json)


def _print_pair(manifest: PairManifest, out: Path, as_json: bool) -> None:
    num_bytes = sum(entry.num_bytes for entry in manifest.files.values())
    variants = [(role, each) for role, member in manifest.members() for each in member.variants]
    document = {
        **{"path": str(out), "num_bytes": num_bytes, "kind": manifest.kind},
        "notes": manifest.notes,
        "variants": [
            {"role": role, **each.model_dump(exclude={"files"}), "num_bytes": each.num_bytes}
            for role, each in variants
        ],
    }
    kind = "" if manifest.kind is None else f", for {manifest.kind}"
    lines = [
        f"{out}: {num_bytes / 1e6:.1f} MB{kind}",
        *(
            f"{role} {each.format} {each.quantization}, {each.num_bytes / 1e6:.1f} MB: {each.why}"
            for role, each in variants
        ),
        *(f"note: {note}" for note in manifest.notes),
    ]
    print_result(as_json, document, lines)
