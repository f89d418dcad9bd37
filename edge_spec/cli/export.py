"""`edge-spec export MODEL OUT`: a bundle in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_spec.cli import options


def export(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP, show_default=False)],
    out: Annotated[
        Path,
        typer.Argument(help="Directory to write, or the file of a GGUF.", show_default=False),
    ],
    format: Annotated[
        str, typer.Option(help="onnx, gguf, coreml, or optimum: onnx of other architectures.")
    ] = "onnx",
    quant: Annotated[
        str | None,
        typer.Option(
            help="onnx: int4, int8, fp16, fp32 (default int4); optimum: int4, int8, fp32 (default "
            "int4); gguf: Q4_0, Q8_0, Q4_K_M, F16 and others (default Q4_0); coreml: int4, int8, "
            "fp16 for the GPU (default int4), lut4, lut6, fp16 for the Neural Engine (default "
            "lut6)."
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="onnx, optimum: weights with one scale, 32, 64 or 128.  [default: 32]"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Keep only the first layers, for a draft.")
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(help="coreml: the unit to lay the graph out for, gpu or ane.  [default: gpu]"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="coreml: tokens that the cache holds.  [default: up to 2048]"),
    ] = None,
    hidden_states: Annotated[
        bool, typer.Option("--hidden-states", help="coreml: return them beside the scores.")
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Compare the result with the reference model.")
    ] = True,
    json: options.Json = False,
) -> None:
    """Convert a model into a bundle or GGUF file that `chat` and `generate` open directly."""
    from edge_spec import plugins
    from edge_spec.cli.progress import ProgressBar
    from edge_spec.model import ExportOptions
    from edge_spec.sources import Source

    with ProgressBar() as progress:
        exporter = plugins.load_exporter(format)
        source = plugins.open_exportable(exporter, Source(model, progress).path)
        export_options = ExportOptions(
            quant, block_size, layers, check, compute, context, hidden_states
        )
        report = exporter.export(source, out, export_options, progress)
    if json:
        from json import dumps

        written = {"path": str(report.path), "num_bytes": report.num_bytes, "notes": report.notes}
        print(dumps({**written, **report.parity}))
        return
    print(f"{report.path}: {report.num_bytes / 1e6:.1f} MB")
    for note in report.notes:
        print(note)
    if report.parity:
        print(
            "against the reference: perplexity {source_perplexity:.3f} -> {perplexity:.3f}, "
            "KL divergence {kl_divergence:.4f}, largest logit difference "
            "{max_logit_difference:.3g}".format(**report.parity)
        )
