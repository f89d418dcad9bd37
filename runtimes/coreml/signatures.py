"""Reads how the functions of packages and of programs of MIL are declared."""

from __future__ import annotations

from typing import Any

from edge_spec.runtimes.static.layout import Shape, Signature


def signatures_of_spec(spec: Any) -> dict[str, Signature]:
    """Reads the signatures of a package's specification, a protocol buffer."""
    described = spec.description
    functions = described.functions or [described]

    def shapes(features: Any) -> dict[str, Shape]:
        return {each.name: tuple(each.type.multiArrayType.shape) for each in features}

    return {
        getattr(function, "name", "") or "main": Signature(
            shapes(function.input),
            shapes(function.output),
            {each.name: tuple(each.type.stateType.arrayType.shape) for each in function.state},
        )
        for function in functions
    }


def signatures_of_program(program: Any) -> dict[str, Signature]:
    """Reads the signatures of a pymil Program, which need not have been saved."""
    found = {}
    for name, function in program.functions.items():
        states = {key for key, var in function.inputs.items() if is_state(var)}
        inputs = {key: tuple(var.shape) for key, var in function.inputs.items()}
        found[name] = Signature(
            {key: shape for key, shape in inputs.items() if key not in states},
            {var.name: tuple(var.shape) for var in function.outputs},
            {key: shape for key, shape in inputs.items() if key in states},
        )
    return found


def is_state(var: Any) -> bool:
    """Whether a pymil Var is a function's state."""
    from coremltools.converters.mil.mil import types

    return bool(types.is_state(var.sym_type))


def is_half(var: Any) -> bool:
    """Whether a pymil Var is of float16."""
    from coremltools.converters.mil.mil import types

    return bool(var.dtype == types.fp16)
