"""llama.cpp on a Vulkan device, which Mesa's lavapipe is in software.

Needs a backend that `python benchmarks/vulkan_backend.py DIRECTORY` made, in EDGE_SPEC_VULKAN, and
runs alone: `pytest -m slow -n 0 tests/integration/vulkan`. Other tests would find the device, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_spec.runtimes.llamacpp import LlamaCppModel

BACKEND = os.environ.get("EDGE_SPEC_VULKAN")
HERE = Path(__file__).parent
DEVICE = "vulkan0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if BACKEND is None:
        reason = "needs EDGE_SPEC_VULKAN, which benchmarks/vulkan_backend.py makes"
    elif any(HERE not in item.path.parents for item in items):
        reason = "runs alone: pytest -m slow -n 0 tests/integration/vulkan"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def backend() -> Iterator[None]:
    """For this process and those that it starts. A device of type CPU is one only if named."""
    with pytest.MonkeyPatch.context() as patch:
        if BACKEND is not None:
            patch.setenv("GGML_BACKEND_PATH", BACKEND)
            patch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
        yield


@pytest.fixture(scope="session")
def target(gguf: Callable[..., Path]) -> Path:
    """Two layers and a head."""
    return gguf()


@pytest.fixture
def on_vulkan(
    target: Path, open_llama: Callable[..., LlamaCppModel]
) -> Callable[..., LlamaCppModel]:
    return lambda **options: open_llama("llamacpp", target, providers=(DEVICE,), **options)
