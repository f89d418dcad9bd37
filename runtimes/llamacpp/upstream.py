"""llama.cpp through llama-cpp-python (tried with 0.3.36)."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from os import environ
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np

from edge_spec.errors import EdgeSpecError, MissingDependencyError
from edge_spec.runtimes.llamacpp.library import Library

# Turns of a waiting thread at a barrier before it sleeps, some 0.1 ms. GNU's OpenMP has 300,000, in
# which it keeps a processor from the thread that it waits for where others want one, too. A step of
# a 1.5B beside one busy process took 36 ms for 49, and as long as before with none (2 cores of a
# Zen 5; benchmarks/results/engines.json).
_SPINS = "4000"
_opening = Lock()  # of the library, which two threads may want first
# Of wheels of ours: a llama-cpp-python compiled for AVX2, at the end of Python's path.
_BUNDLED = Path(__file__).with_name("bundled")


def load_ahead() -> None:
    """Begins to load the library, in a thread of its own: kernels are tried in another process
    before their first use, and there is enough to do meanwhile. Raises MissingDependencyError."""
    _imported()

    def load() -> None:
        with suppress(EdgeSpecError):  # whoever needs the library is told
            _ = library().rows

    Thread(target=load, name="edge-spec-library", daemon=True).start()


def _imported() -> tuple[Any, Any]:
    """Returns llama.cpp's functions and ggml's. Raises MissingDependencyError where
    llama-cpp-python is not installed or not for this processor."""
    _check_processor()
    try:
        with _short_spins():
            import llama_cpp
            from llama_cpp._ggml import libggml
    except ImportError as error:
        raise MissingDependencyError(
            f"the runtime llamacpp needs llama-cpp-python: {error}",
            remedy='Run: pip install "edge-spec[llamacpp]" (it is compiled, which needs a C++ '
            "compiler and takes minutes; wheels of a release have it inside).",
        ) from error
    return llama_cpp, libggml


def library() -> Library:
    """Raises MissingDependencyError where llama-cpp-python is not installed, DeviceError for a
    backend that does not load."""
    with _opening:
        return _open()


@cache
def _open() -> Library:
    return Library(*_imported())


@contextmanager
def _short_spins() -> Iterator[None]:
    """Has GNU's OpenMP, if it is loaded meanwhile, give up spinning early, unless the user chose
    how threads wait. It reads the environment once; other processes get it as it was."""
    is_left = environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    if is_left:
        environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        yield
    finally:
        if is_left:
            del environ["GOMP_SPINCOUNT"]


def _check_processor() -> None:
    """An instruction that a processor lacks would end the process. Raises
    MissingDependencyError."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None or _BUNDLED not in Path(found.origin).parents:
        return
    if platform.machine().lower() in ("x86_64", "amd64") and not _has_avx2():
        raise MissingDependencyError(
            "the llama.cpp inside edge-spec's wheel needs a processor with AVX2",
            remedy="Run: pip install --force-reinstall --no-deps llama-cpp-python (it is compiled "
            "for this one, which needs a C++ compiler and takes minutes).",
        )


def _has_avx2() -> bool:
    """As numpy says, which names it alone or with what comes along."""
    found: Mapping[str, Any] = np.show_config(mode="dicts").get("SIMD Extensions", {})
    names = {*found.get("baseline", ()), *found.get("found", ())}
    return not names.isdisjoint(("AVX2", "X86_V3"))
