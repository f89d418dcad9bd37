"""Choosing devices and options, and what is said where memory is too short."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import DeviceMemoryError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel, cache
from edge_spec.runtimes.llamacpp.devices import choose_devices
from edge_spec.runtimes.llamacpp.library import LibraryDevice

Files = Callable[..., Path]
OpenLlama = Callable[..., LlamaCppModel]

GIB = 2**30
CPU = LibraryDevice("CPU", "a processor", True, 8 * GIB, 16 * GIB)
CUDA0 = LibraryDevice("CUDA0", "a large card", False, 20 * GIB, 24 * GIB, 1)
CUDA1 = LibraryDevice("CUDA1", "a small card", False, 4 * GIB, 8 * GIB, 2)
VULKAN0 = LibraryDevice("Vulkan0", "a card", False, 4 * GIB, 8 * GIB, 3)
ALL = (CPU, CUDA0, CUDA1, VULKAN0)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ((), (CUDA0, CUDA1, VULKAN0)),
        (("cpu",), ()),
        (("gpu",), (CUDA0, CUDA1, VULKAN0)),
        (("cuda",), (CUDA0,)),
        (("vulkan",), (VULKAN0,)),
        (("CUDA1", "cuda0"), (CUDA1, CUDA0)),
        (("cuda1", "gpu"), (CUDA1, CUDA0, VULKAN0)),
        (("cuda0", "cpu"), (CUDA0,)),
    ],
)
def test_devices_have_names_and_kinds(
    wanted: tuple[str, ...], chosen: tuple[LibraryDevice, ...]
) -> None:
    assert choose_devices(wanted, ALL) == chosen


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        (("abacus",), ALL),
        (("cuda2",), ALL),
        (("cuda0,cuda1",), ALL),  # the command line splits them
        (("",), ALL),
        (("gpu",), (CPU,)),
        (("cuda",), (CPU,)),
    ],
)
def test_an_unknown_device_names_the_known_ones(
    wanted: tuple[str, ...], devices: tuple[LibraryDevice, ...]
) -> None:
    with pytest.raises(UsageError, match="there is no device") as caught:
        choose_devices(wanted, devices)
    assert f"'{wanted[-1]}'" in str(caught.value)
    for device in devices:
        assert f"{device.name.lower()} ({device.description})" in caught.value.remedy


def test_a_cache_beyond_the_free_memory_is_refused_before_the_library_is_asked(
    llama: str, gguf: Files, open_llama: OpenLlama
) -> None:
    model = open_llama(llama, gguf("qwen3"))
    # 2 layers, keys and values of 2 heads of 32, in two bytes, for 128 tokens.
    needed = 2 * 2 * 2 * 32 * 2 * 128
    asked: list[Any] = []

    def library_with(free_bytes: int) -> Any:
        device = replace_free(free_bytes)
        return whole.replacing(
            devices=lambda: [device], open_context=lambda *choices: asked.append(choices)
        )

    def replace_free(free_bytes: int) -> LibraryDevice:
        return LibraryDevice("CPU", "a processor", True, free_bytes, GIB)

    whole = model._weights.library
    model._weights.library = library_with(needed - 1)
    with pytest.raises(DeviceMemoryError) as caught:
        model.open_session()
    assert not asked
    text = str(caught.value)
    assert "CPU has too little memory for a cache of 128 tokens" in text
    assert "needed" in text and "free" in text and "--context" in text and "\n" not in text
    model._weights.library = library_with(needed)
    with pytest.raises(Exception, match="cannot open a context"):  # it was asked, and refuses
        model.open_session()
    assert len(asked) == 1
    model._weights.library = whole
    model.open_session().close()


@pytest.mark.parametrize(
    ("options", "usable"),
    [
        ({"kv_type": "abacus"}, "f16"),
        ({"kv_type": "q8_0", "flash_attention": False}, "without flash attention"),
    ],
)
def test_an_unknown_type_of_the_cache_names_the_usable_ones(
    options: dict[str, Any], usable: str, llama: str, gguf: Files, open_llama: OpenLlama
) -> None:
    with pytest.raises(UsageError, match="takes no KV type") as caught:
        open_llama(llama, gguf(), **options)
    assert usable in str(caught.value)


@pytest.mark.parametrize("runtime", ["ort", "reference"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("gpu_layers", 0), ("kv_type", "f16"), ("mmap", False), ("flash_attention", True)],
)
def test_an_option_of_llama_cpp_is_refused_elsewhere(
    runtime: str, option: str, value: Any, tmp_path: Path
) -> None:
    """Even at a value that would change nothing, and before anything is opened."""
    options = LoadOptions(runtime=runtime, **{option: value}).runtime_options
    name = option.replace("_", "-")
    with pytest.raises(UsageError, match=f"{runtime} has no option {name}"):
        runtimes.load_runtime(runtime).open(tmp_path, options)


SHORT_OF_MEMORY = """
import resource
import sys
from pathlib import Path
from edge_spec.models import runtimes
from edge_spec.errors import EdgeSpecError
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree

published = runtimes.open_model_info(Path(sys.argv[2]))
model = runtimes.load_runtime(sys.argv[1]).open(published, RuntimeOptions(threads=1, mmap=False))
session = model.open_session()
session.prefill([1, 2, 3])
before = session.forward(TokenTree.chain(1)).logits.copy()
tokens = [1] * 1_000_000  # room for them is made before any of them is scored
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, hard))
for _ in range(3):
    try:
        session.prefill(tokens)
    except EdgeSpecError as error:
        print(f"{type(error).__name__}: {error}")
    assert session.length == 3
    assert (session.forward(TokenTree.chain(1)).logits == before).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_a_real_failure_to_allocate_is_one_line_and_leaves_the_session_usable(
    llama: str, tiny: Any, tmp_path: Path
) -> None:
    """A cache of a million tokens takes 256 MB, and 200 MiB are left."""
    model = tiny.build("llama", max_position_embeddings=2**20)
    path = tiny.write_gguf(model, tmp_path / "model.gguf")
    command = [sys.executable, "-c", SHORT_OF_MEMORY, llama, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[:500]
    assert "Traceback" not in done.stderr
    outcomes = done.stdout.splitlines()
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome.startswith("DeviceMemoryError: CPU has too little memory for a cache of")
        assert "256 MB needed" in outcome


def test_the_first_cache_is_small_whatever_the_context_is(
    llama: str, tiny: Any, tmp_path: Path, open_llama: OpenLlama
) -> None:
    model = tiny.build("llama", max_position_embeddings=2**20)
    opened = open_llama(llama, tiny.write_gguf(model, tmp_path / "model.gguf"))
    choices = opened.open_session()._sequence.home.choices
    assert choices.num_tokens == cache.FIRST_TOKENS
    assert opened.config.context_length == 2**20
