"""The three calls of coreai-core that are not public: a state, constants of 4 bits, and composites.

Apple's coreai-torch makes all in the same way. They hold for the version that
`edge_spec.models.core_ai` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from coreai import authoring  # before its parts, which import each other
from coreai._compiler.dialects.coreai import ConstantOp
from coreai._compiler.dialects.coreai.constant import create_elements_attr
from coreai._compiler.ir import (
    ArrayAttr,
    Attribute,
    DictAttr,
    IntegerType,
    Location,
    RankedTensorType,
    StringAttr,
)

_STATE = "MutableBuffers.buffer_mutation"


def mark_states(graph: Any, states: Mapping[str, str]) -> None:
    """Have the graph write inputs in place. states: the names of inputs, and of the outputs that
    are their new values. graph: what the decorator `coreai.authoring.graph` returns."""
    operation, marked = graph._callable, []
    for attributes in operation.arg_attrs:
        named = {each.name: each.attr for each in attributes}
        output = states.get(named["coreai.name"].value)
        if output is not None:
            named[_STATE] = StringAttr.get(output)
        marked.append(DictAttr.get(named))
    operation.arg_attrs = ArrayAttr.get(marked)


def composite_declaration(
    name: str, inputs: Iterable[str], attributes: Mapping[str, bool | int | float]
) -> Any:
    """Return the attribute that marks a graph as the operation `name` of one result. Call it inside
    a module."""
    names = ", ".join(f'"{each}"' for each in inputs)
    stated = {**attributes, "version": 1}
    listed = ", ".join(f"{key} = {_format_value(value)}" for key, value in stated.items())
    return Attribute.parse(
        f'#coreai.composite_declaration<"{name}" = {{input_names = [{names}], '
        f'op_attrs = {{{listed}}}, output_names = ["output"]}}>'
    )


def _format_value(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value} : si64" if isinstance(value, int) else f"{value:.9e} : f32"


def constant_of_4_bits(values: np.ndarray) -> authoring.Value:
    """Add a constant of integers from -8 to 7, two a byte, the first one low: the public `constant`
    does not pack them. values: int8."""
    kind = RankedTensorType.get(list(values.shape), IntegerType.get_signed(4))
    nibbles = np.append(values.ravel().view(np.uint8) & 15, np.zeros(values.size % 2, np.uint8))
    packed = np.ascontiguousarray(nibbles[::2] | nibbles[1::2] << 4)
    stored = create_elements_attr(Location.unknown(), kind, packed)
    return authoring.Value._from_mlir(ConstantOp(value=stored).result)
