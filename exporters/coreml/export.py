"""Write a checkpoint as a bundle with a Core ML package."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Program
from coremltools.converters.mil.converter import ConverterRegistry, mil_convert_to_proto

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.block_quantize import weigh_columns
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.coreml.graph import ANE_MAX_SIZE, AnePass, GpuPass, build_program
from edge_spec.exporters.coreml.weights import CoreMlWeights, Storage, blocks, dense, palette
from edge_spec.exporters.parity import against_reference, scores_by
from edge_spec.exporters.requests import (
    check_request,
    chosen_shape,
    describe,
    report_bundle,
    require_plain,
    require_whole_blocks,
)
from edge_spec.models.devices import devices_of
from edge_spec.storage.atomic import atomic_directory

PACKAGE = "model.mlpackage"
COMPUTE = "edge_spec.compute"  # metadata key: the target compute unit
SPECIFICATION = 9  # iOS 18, macOS 15
GPU, ANE = "gpu", "ane"
_UNCOMPARED = "not compared with the reference: Core ML runs on macOS 15 or newer only"
_MAX_STATE_BYTES = (1 << 31) - 1
_ANE_ALIGNMENT = 32  # of the last axis, in float16: 64 bytes ("Deploying Transformers on the ANE")


@dataclass(frozen=True)
class CoreMlQuantization:
    """How layers (`body`), and embedding and head (`head`, where few bits cost most), are stored.
    The bound is several times what the demo model measures (docs/apple.md)."""

    body: Storage
    head: Storage
    max_kl_divergence: float  # nats


_HALF = CoreMlQuantization(dense(np.float16), dense(np.float16), 5e-3)
QUANTIZATIONS: Mapping[str, Mapping[str, CoreMlQuantization]] = {
    GPU: {
        "int4": CoreMlQuantization(blocks(4), blocks(8), 1.5),
        "int8": CoreMlQuantization(blocks(8), blocks(8), 0.05),
        "fp16": _HALF,
    },
    # The Neural Engine has no weights in blocks along a row (ANEMLL), so it uses tables.
    ANE: {
        "lut6": CoreMlQuantization(palette(6), palette(6), 0.5),
        "lut4": CoreMlQuantization(palette(4), palette(6), 2.0),
        "fp16": _HALF,
    },
}


class CoreMlExporter:
    format = "coreml"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_plain(checkpoint, "Core ML")

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out`; compare it with the reference where Core ML runs."""
        out = out.absolute()
        compute, name = _checked(checkpoint, out, options)
        checkpoint = first_layers(checkpoint, options.num_layers)
        most = _max_slots(checkpoint.config, compute)
        shape = chosen_shape(checkpoint.config, options.context_length, most, compute)
        config = replace(checkpoint.config, context_length=shape.context_length)
        quantization = QUANTIZATIONS[compute][name]
        with atomic_directory(out) as work:
            if name != "fp16":
                checkpoint = weigh_columns(checkpoint, progress)
            weights = CoreMlWeights(checkpoint, quantization.body, quantization.head, np.float16)
            layout = AnePass if compute == ANE else GpuPass
            program = build_program(
                weights,
                layout,
                config,
                shape,
                options.hidden_states,
                lambda done: progress("Converting the weights", done),
            )
            progress("Writing the package", 0.0)
            save_package(program, work / PACKAGE, compute)
            bound = quantization.max_kl_divergence
            score = partial(scores_by, "coreml")
            compared = against_reference(checkpoint, score, bound, progress)
            is_compared = options.check and _runs_here()
            describe(
                work,
                checkpoint,
                config,
                format=self.format,
                quantization=f"{name} for the {compute}",
                check=compared if is_compared else None,
            )
        return report_bundle(out, (_UNCOMPARED,) if options.check and not is_compared else ())


def _runs_here() -> bool:
    return all(device["fault"] is None for device in devices_of("coreml"))


def _checked(checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> tuple[str, str]:
    compute = GPU if options.compute is None else options.compute
    if compute not in QUANTIZATIONS:
        raise UsageError(
            f"unknown compute unit {compute!r}", remedy=f"Choose one of {', '.join(QUANTIZATIONS)}."
        )
    known, own_options = QUANTIZATIONS[compute], ("compute", "context_length", "hidden_states")
    exporter, config = CoreMlExporter(), checkpoint.config
    name = check_request(exporter, checkpoint, out, options, known, *own_options, device=compute)
    if name.startswith("int"):
        require_whole_blocks(checkpoint, "Export it with --quant fp16.")
    if compute == ANE and config.head_dim % _ANE_ALIGNMENT:
        raise UnsupportedModelError(
            f"{checkpoint.path}: the Neural Engine needs a head size that is a multiple of "
            f"{_ANE_ALIGNMENT}, this model has {config.head_dim}",
            remedy="Export it with --compute gpu.",
        )
    return compute, name


def _max_slots(config: ModelConfig, compute: str) -> int:
    states = 1 if compute == ANE else 2
    a_slot = 2 * 2 * config.num_layers * config.kv_size // states  # bytes, in float16
    most = _MAX_STATE_BYTES // a_slot
    return min(most, ANE_MAX_SIZE) if compute == ANE else most


def save_package(program: Program, path: Path, compute: str) -> None:
    """Write `path`, a new .mlpackage for iOS 18 or macOS 15 and later."""
    # In the same folder, so that weights are moved, not copied. Hides progress bars.
    with TemporaryDirectory(dir=path.parent) as weights, redirect_stderr(StringIO()):
        specification: Any
        specification, _ = mil_convert_to_proto(
            program,
            "milinternal",
            "mlprogram",
            ConverterRegistry,
            main_pipeline=ct.PassPipeline.EMPTY,  # keep the program as built
            specification_version=SPECIFICATION,
            weights_dir=weights,
            export_multi_functions=True,
        )
        specification.description.metadata.userDefined[COMPUTE] = compute
        ct.utils.save_spec(specification, str(path), weights_dir=weights)
