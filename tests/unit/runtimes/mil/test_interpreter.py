"""Programs run in numpy: their state, their types, what they share, what they do not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.runtimes.coreml.library import import_coremltools
from edge_spec.runtimes.mil.constants import Constants
from edge_spec.runtimes.mil.interpreter import Interpreted, interpret
from edge_spec.runtimes.mil.state_flow import plan_state

ct = import_coremltools()
from coremltools.converters.mil import Builder as mb  # noqa: E402, N813
from coremltools.converters.mil import Function  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402

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


def test_a_state_is_written_in_place() -> None:
    def body(new: Any, state: Any) -> Any:
        updated = put(mb.read_state(input=state), new, 1)
        return mb.identity(x=mb.coreml_update_state(state=state, value=updated))

    (cache,), state, same = run(function(body))
    assert same
    assert cache.tolist() == state.tolist() == [[0, 1, 2], [7, 8, 9]]


def test_several_writes_before_an_update_are_made_in_place() -> None:
    def body(new: Any, state: Any) -> Any:
        updated = put(put(mb.read_state(input=state), new, 1), new, 0)
        return mb.identity(x=mb.coreml_update_state(state=state, value=updated))

    _, state, same = run(function(body))
    assert same
    assert state.tolist() == [[7, 8, 9], [7, 8, 9]]


def test_what_a_state_was_can_be_looked_at_after_it_was_written() -> None:
    def body(new: Any, state: Any) -> Any:
        old = mb.read_state(input=state)
        view = mb.reshape(x=old, shape=[6])
        mb.coreml_update_state(state=state, value=put(old, new, 1))
        return mb.identity(x=view)

    (view,), state, same = run(function(body))
    assert not same
    assert view.tolist() == [0, 1, 2, 3, 4, 5]
    assert state.tolist() == [[0, 1, 2], [7, 8, 9]]


def test_a_slice_that_is_used_after_a_write_is_copied_and_the_state_is_not() -> None:
    """Keys and values of a layer in one state: keys are used once the values are written."""

    def body(new: Any, state: Any) -> list[Any]:
        cache = put(mb.read_state(input=state), new, 0)
        cache = mb.coreml_update_state(state=state, value=cache)
        keys = row_of(cache, 1)
        cache = mb.coreml_update_state(state=state, value=put(cache, new, 1))
        return [mb.identity(x=keys), mb.identity(x=row_of(cache, 1))]

    built = function(body)
    assert len(plan_state(built).in_place) == 2 and len(plan_state(built).copied) == 1
    (keys, values), state, same = run(built)
    assert same
    assert keys.tolist() == [[3, 4, 5]]
    assert values.tolist() == NEW.tolist()
    assert state.tolist() == [[7, 8, 9], [7, 8, 9]]


def test_a_write_that_ends_in_no_update_leaves_the_state() -> None:
    def body(new: Any, state: Any) -> Any:
        return mb.identity(x=put(mb.read_state(input=state), new, 1))

    (found,), state, same = run(function(body))
    assert same
    assert found.tolist() == [[0, 1, 2], [7, 8, 9]]
    assert state.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_state_read_before_its_update_is_what_it_was() -> None:
    def body(new: Any, state: Any) -> list[Any]:
        updated = put(mb.read_state(input=state), new, 1)
        again = mb.read_state(input=state)
        old = mb.identity(x=again)
        mb.coreml_update_state(state=state, value=updated)
        return [mb.add(x=old, y=np.float32(0)), mb.add(x=mb.read_state(input=state), y=NEW)]

    (old, new), state, _ = run(function(body))
    assert old.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state.tolist() == [[0, 1, 2], [7, 8, 9]]
    assert new.tolist() == [[7, 9, 11], [14, 16, 18]]


def test_a_state_can_be_replaced_by_something_else() -> None:
    def body(new: Any, state: Any) -> Any:
        both = mb.concat(values=[new, new], axis=0)
        return mb.identity(x=mb.coreml_update_state(state=state, value=both))

    (found,), state, _ = run(function(body))
    assert found.tolist() == state.tolist() == [[7, 8, 9], [7, 8, 9]]


def planned(body: Body, dtype: Any, shared: Constants | None = None) -> Interpreted:
    return interpret(function(body, dtype), Constants() if shared is None else shared)


def zeros() -> dict[str, np.ndarray]:
    return {"cache": np.zeros(SHAPE, np.float32)}


@pytest.mark.parametrize(("dtype", "expected"), [(types.fp32, 1e-4), (types.fp16, 0.0)])
def test_each_result_has_the_precision_of_the_program(dtype: Any, expected: float) -> None:
    kind = types.nptype_from_builtin(dtype)

    def body(new: Any, state: Any) -> Any:
        return mb.sub(x=mb.add(x=new, y=kind(1e-4)), y=new)

    inputs = {"new": np.ones((1, 3), np.float32)}
    found = planned(body, dtype).run(inputs, zeros())
    (result,) = found.values()
    assert result.dtype == kind
    np.testing.assert_allclose(result, np.full((1, 3), expected), atol=1e-7)


def test_products_of_float16_are_summed_in_float32() -> None:
    """1000 * 1000 is beyond float16; what is left of the sum is not."""

    def body(new: Any, state: Any) -> Any:
        return mb.linear(x=new, weight=np.array([[1000, 1000, 1]], np.float16))

    inputs = {"new": np.array([[1000, -1000, 2]], np.float16)}
    (result,) = planned(body, types.fp16).run(inputs, zeros()).values()
    assert result.tolist() == [[2]]


def test_an_operation_without_an_entry_is_folded_by_coremltools() -> None:
    (found,) = (
        planned(lambda new, state: mb.cos(x=new), types.fp32).run({"new": NEW}, zeros()).values()
    )
    np.testing.assert_allclose(found, np.cos(NEW), atol=1e-6)


def test_an_unknown_operation_is_named() -> None:
    def body(new: Any, state: Any) -> Any:
        return mb.gather_nd(x=new, indices=np.array([[0]], np.int32), name="the_name")

    with pytest.raises(UnsupportedModelError, match=r"operation gather_nd \(the_name\)"):
        planned(body, types.fp32)


def test_an_operation_that_fails_is_named() -> None:
    def body(new: Any, state: Any) -> Any:
        last = mb.cast(x=mb.reduce_sum(x=new, axes=[0, 1]), dtype="int32")
        return mb.gather(x=np.zeros((4, 2), np.float32), indices=last, name="the_name")

    with pytest.raises(SessionError, match="gather the_name cannot be evaluated: index 24"):
        planned(body, types.fp32).run({"new": NEW}, zeros())


def weighted(new: Any, state: Any) -> Any:
    weight = mb.constexpr_blockwise_shift_scale(
        data=np.arange(6, dtype=np.int8).reshape(2, 3), scale=np.array([[2], [3]], np.float16)
    )
    return mb.linear(x=new, weight=weight)


def test_compressed_weights_are_expanded_once_for_all_functions() -> None:
    shared = Constants()
    first, second = (planned(weighted, types.fp16, shared) for _ in range(2))
    (result,) = first.run({"new": NEW}, zeros()).values()
    np.testing.assert_array_equal(result, NEW @ [[0, 9], [2, 12], [4, 15]])
    arrays = [
        {id(value) for value in each.values if isinstance(value, np.ndarray)}
        for each in (first, second)
    ]
    assert arrays[0] == arrays[1]


def test_what_depends_on_no_input_is_computed_once() -> None:
    def body(new: Any, state: Any) -> Any:
        weight = mb.constexpr_lut_to_dense(
            indices=np.array([[0, 1, 1]], types.nptype_from_builtin(types.uint8)).astype(np.uint8),
            lut=np.arange(256, dtype=np.float32).reshape(1, 1, 256, 1),
        )
        return mb.add(x=new, y=mb.mul(x=weight, y=np.float32(10)))

    plan = planned(body, types.fp32)
    assert len(plan.steps) == 1
    (result,) = plan.run({"new": NEW}, zeros()).values()
    assert result.tolist() == [[7, 18, 19]]
