"""A program as a package on disk: the specification and one weight file for all functions."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import coremltools as ct
from coremltools.converters.mil import Program
from coremltools.converters.mil.converter import mil_convert

COMPUTE = "edge_spec.compute"  # user-defined metadata: the unit that the program is laid out for
_SPECIFICATION = 9  # iOS 18, macOS 15


def save(program: Program, path: Path, compute: str) -> None:
    """Writes `path`, a new .mlpackage, which needs iOS 18 or macOS 15."""
    with redirect_stderr(StringIO()):  # it draws progress bars
        model: Any = mil_convert(
            program,
            convert_from="milinternal",
            convert_to="mlprogram",
            specification_version=_SPECIFICATION,
            compute_units=ct.ComputeUnit.CPU_ONLY,
            export_multi_functions=True,
            skip_model_load=True,
        )
    model.user_defined_metadata[COMPUTE] = compute
    model.save(str(path))
