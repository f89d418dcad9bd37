"""Programs run in numpy: their state, their types, what they share, what they do not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

import coremltools as ct
from coremltools.converters.mil import Builder as mb  # noqa: N813
from coremltools.converters.mil import Function
from coremltools.converters.mil.mil import types

from edge_spec.errors import SessionError
from fixtures.mil_in_numpy import Constants, interpret

SHAPE = (2, 3)
NEW = np.array([[7, 8, 9]], np.float32)
Body = Callable[..., Any]


def function(body: Body, dtype: Any = types.fp32) -> Any:
    """body(new, state): a function of `new` [1, 3] and a state [2, 3], and what it returns."""
    inputs = {"new": mb.placeholder((1, 3), dtype=dtype)}
    inputs["cache"] = mb.state_tensor_placeholder(SHAPE, dtype=dtype)
    with Function(inputs, opset_version=ct.target.iOS18) as built:
        found = body(built.inputs["new"], built.inputs["cache"])
        built.set_outputs(found if isinstance(found, list) else [found])
    return built


def put(cache: Any, new: Any, row: int) -> Any:
    return mb.slice_update(x=cache, update=new, begin=[row, 0], end=[row + 1, 3])


def row_of(cache: Any, row: int) -> Any:
    return mb.slice_by_index(x=cache, begin=[row, 0], end=[row + 1, 3])


def run(built: Any) -> tuple[list[np.ndarray], np.ndarray, bool]:
    """Outputs, the state afterwards, and whether it is the same array as before."""
    before = np.arange(6, dtype=np.float32).reshape(SHAPE)
    state = {"cache": before}
    found = interpret(built, Constants()).run({"new": NEW}, state)
    return list(found.values()), state["cache"], state["cache"] is before


def test_a_state_is_written_in_place_and_a_slice_of_it_is_what_it_was() -> None:
    """As layers do: keys and values are written one after the other, and used later."""

    def body(new: Any, state: Any) -> list[Any]:
        cache = mb.coreml_update_state(state=state, value=put(mb.read_state(input=state), new, 0))
        first, second = row_of(cache, 0), row_of(cache, 1)
        cache = mb.coreml_update_state(state=state, value=put(put(cache, new, 1), new, 0))
        return [mb.add(x=each, y=np.float32(0)) for each in (first, second, row_of(cache, 1))]

    (written, old, again), state, same = run(function(body))
    assert same
    assert written.tolist() == again.tolist() == NEW.tolist()
    assert old.tolist() == [[3, 4, 5]]
    assert state.tolist() == [[7, 8, 9], [7, 8, 9]]


def test_what_a_state_was_before_an_update_is_not_looked_at() -> None:
    """Core ML would keep it: here it fails, and never is another number."""

    def body(new: Any, state: Any) -> Any:
        old = mb.read_state(input=state)
        mb.coreml_update_state(state=state, value=put(old, new, 1))
        return mb.add(x=row_of(old, 1), y=new)

    with pytest.raises(SessionError, match=r"slice_by_index .* cannot be evaluated"):
        run(function(body))


@pytest.mark.parametrize(("dtype", "expected"), [(types.fp32, 1e-4), (types.fp16, 0.0)])
def test_each_result_has_the_precision_of_the_program(dtype: Any, expected: float) -> None:
    kind = types.nptype_from_builtin(dtype)

    def body(new: Any, state: Any) -> Any:
        return mb.sub(x=mb.add(x=new, y=kind(1e-4)), y=new)

    inputs, state = {"new": np.ones((1, 3), np.float32)}, {"cache": np.zeros(SHAPE, np.float32)}
    (result,) = interpret(function(body, dtype), Constants()).run(inputs, state).values()
    assert result.dtype == kind
    np.testing.assert_allclose(result, np.full((1, 3), expected), atol=1e-7)
