"""Calls coreai-core, whose calls are coroutines: an event loop in its own thread runs them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import wait
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar

import numpy as np

from edge_spec.errors import BundleError, EdgeSpecError, SessionError
from edge_spec.models.core_ai import INSTALL, is_mac
from edge_spec.models.devices import CPU, GPU
from edge_spec.runtimes.libraries import import_library
from edge_spec.runtimes.static.session import EXPORT_AGAIN, Signature

ANE = "ane"
UNITS: Mapping[str, str] = {CPU: "cpu", GPU: "gpu", ANE: "neural_engine"}  # as the library has them
_State = dict[str, Any]  # coreai's NDArrays by state
_Found = TypeVar("_Found")


class NativeProgram:
    """A loaded program; see `Program`. unit: the Mac's preferred one, None: Core AI chooses."""

    signatures: Mapping[str, Signature]

    def __init__(self, path: Path, unit: str | None) -> None:
        """Raises BundleError for a damaged program, MissingDependencyError."""
        self._runtime = import_library("coreai.runtime", "AIModel", INSTALL)
        self._path, self._loop, self._lock = path, asyncio.new_event_loop(), Lock()
        self._opened = AsyncExitStack()
        self._thread = Thread(target=self._loop.run_forever, name="Core AI", daemon=True)
        self._thread.start()
        try:
            functions = self._wait(self._load(unit))
            self.signatures = {name: _signature(each.desc) for name, each in functions.items()}
        except EdgeSpecError:
            self.close()
            raise
        except Exception as error:  # the library's, as RuntimeError
            self.close()
            raise BundleError(f"cannot read {path}: {error}", remedy=EXPORT_AGAIN) from error
        self._functions = functions

    def make_state(self) -> _State:
        (shapes,) = {tuple(each.states.items()) for each in self.signatures.values()}
        return {name: self._runtime.NDArray(np.zeros(shape, np.float32)) for name, shape in shapes}

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: _State
    ) -> Mapping[str, np.ndarray]:
        array = self._runtime.NDArray
        mask = {"mask": inputs["mask"].astype(np.float32)} if "mask" in inputs else {}
        tensors = {name: array(each) for name, each in {**inputs, **mask}.items()}
        with self._lock:  # sessions may be used by threads of their own
            try:
                found = self._wait(self._functions[function](tensors, state))
            except Exception as error:  # the library's, as RuntimeError
                raise SessionError(
                    f"Core AI failed to run {function} of {self._path}: {error}",
                    remedy="Try another --device or --runtime.",
                ) from error
        return {name: each.numpy() for name, each in found.items()}

    def read_state(self, state: _State, name: str) -> np.ndarray:
        return np.array(state[name].numpy())

    def write_state(self, state: _State, name: str, value: np.ndarray) -> None:
        state[name] = self._runtime.NDArray(np.ascontiguousarray(value))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._functions = {}
        self._wait(self._opened.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _load(self, unit: str | None) -> Mapping[str, Any]:
        asset = import_library("coreai.authoring", "AIModelAsset", INSTALL).AIModelAsset
        options = None
        if unit is not None and is_mac():
            kind = getattr(self._runtime.ComputeUnitKind, UNITS[unit])()
            make = self._runtime.SpecializationOptions.from_preferred_compute_unit_kind
            options = make(kind)
        opened = asset.load(self._path).executable(options)
        model = await self._opened.enter_async_context(opened)
        with _silenced():
            return {name: model.load_function(name) for name in model.function_names}

    def _wait(self, call: Coroutine[Any, Any, _Found]) -> _Found:
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return running.result()
        except BaseException:  # an interrupt: nobody may use the program before the call has ended
            wait([running])
            raise


@contextmanager
def _silenced() -> Iterator[None]:
    """Hide what the library for Linux prints to standard error as it loads functions."""
    if is_mac():
        yield
        return
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _signature(described: Any) -> Signature:
    """described: coreai's InferenceFunctionDescriptor."""

    def shapes(names: list[str], of: Callable[[str], Any]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(size or 0 for size in of(name).shape) for name in names}

    return Signature(
        shapes(described.input_names, described.input_descriptor),
        shapes(described.output_names, described.output_descriptor),
        shapes(described.state_names, described.state_descriptor),
    )
