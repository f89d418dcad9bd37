"""A program as a package on disk: the specification and one weight file for all functions."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coremltools as ct
from coremltools.converters.mil import Program
from coremltools.converters.mil.converter import ConverterRegistry, mil_convert_to_proto
from coremltools.converters.mil.frontend.milproto.load import load

COMPUTE = "edge_spec.compute"  # user-defined metadata: the unit that the program is laid out for
SPECIFICATION = 9  # iOS 18, macOS 15


def save(program: Program, path: Path, compute: str) -> None:
    """Writes `path`, a new .mlpackage, which needs iOS 18 or macOS 15."""
    # Beside it: weights are moved, not copied, within a disk. Progress bars are coremltools' own.
    with TemporaryDirectory(dir=path.parent) as weights, redirect_stderr(StringIO()):
        specification: Any
        specification, _ = mil_convert_to_proto(
            program,
            "milinternal",
            "mlprogram",
            ConverterRegistry,
            main_pipeline=ct.PassPipeline.EMPTY,  # the program is saved as it was built
            specification_version=SPECIFICATION,
            weights_dir=weights,
            export_multi_functions=True,
        )
        specification.description.metadata.userDefined[COMPUTE] = compute
        ct.utils.save_spec(specification, str(path), weights_dir=weights)


def read_function(package: Path, specification: Any, name: str) -> Any:
    """Reads one function of a package back, as pymil has it, with its weights."""
    alone = type(specification)()
    alone.specificationVersion = specification.specificationVersion
    source = specification.mlProgram
    alone.mlProgram.version = source.version
    alone.mlProgram.functions[name].CopyFrom(source.functions[name])
    weights = package / "Data" / "com.apple.CoreML" / "weights"
    return load(alone, SPECIFICATION, str(weights)).functions[name]
