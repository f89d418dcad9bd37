"""Operations that only coremltools itself knows how to compute: by its constant folding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edge_spec.errors import UnsupportedModelError
from edge_spec.runtimes.coreml.library import import_coremltools


def folding(operation: Any) -> Callable[..., Any]:
    """A function that builds `operation` with constants and returns what coremltools makes of it.

    Raises UnsupportedModelError for operations that it does not fold, at the latest when called.
    """
    from coremltools.converters.mil.mil import Operation

    kind, name = operation.op_type, operation.name
    if operation.blocks or type(operation).value_inference is Operation.value_inference:
        raise _unknown(kind, name)
    inputs = operation.inputs.items()
    types = {each: var.dtype for each, var in inputs if hasattr(var, "dtype")}  # no tuples

    def fold(**arguments: Any) -> Any:
        typed = {each: _typed(value, types.get(each)) for each, value in arguments.items()}
        found = fold_constants(kind, typed)
        if found is None:
            raise _unknown(kind, name)
        return found

    return fold


def fold_constants(kind: str, arguments: dict[str, Any]) -> Any:
    """An operation's result by coremltools, a list where there are several; None where it does
    not fold it."""
    coremltools = import_coremltools()
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.mil import Function

    with Function({}, opset_version=coremltools.target.iOS18):
        result = getattr(Builder, kind)(**arguments)
    if isinstance(result, tuple | list):
        return [var.val for var in result]
    return result.val


def _typed(value: Any, dtype: Any) -> Any:
    """Types a value as the program has it: float16 comes as float32."""
    from coremltools.converters.mil.mil import types

    if dtype is None or not isinstance(value, np.ndarray):
        return value
    return value.astype(types.nptype_from_builtin(dtype))


def _unknown(kind: str, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the numpy evaluation of Core ML programs does not know the operation {kind} ({name})",
        remedy="Run the package on macOS with --runtime coreml.",
    )
