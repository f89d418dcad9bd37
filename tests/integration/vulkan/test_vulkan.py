"""What models on CPUs are held to, on a device that has its own memory and does its work later."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.engine.results import GenerationResult
from edge_spec.errors import UsageError
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.testing.session import check_session

OnVulkan = Callable[..., LlamaCppModel]
OpenLlama = Callable[..., LlamaCppModel]

PROMPT = "one two one two one two"
# Shaders multiply in float16 and sum in other orders than the CPU, at each width in another: a
# logit of this model, of deviation 2.7, differed by 0.02 between two ways to score it, and by 0.001
# from the CPU's.
TOLERANCE = 0.1
COMMAND = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **environment},
    )


def answered(target: Path, **options: Any) -> GenerationResult:
    chosen = LoadOptions(runtime="llamacpp", device="vulkan0", threads=1, **options)
    with load_engine(str(target), chosen, lambda what, fraction: None) as engine:
        return engine.generate(PROMPT, max_tokens=24)


def test_sessions_keep_what_they_promise(on_vulkan: OnVulkan) -> None:
    """Prefill, chains, trees, commit, rollback, state and two sessions at once."""
    print(f"largest difference {check_session(on_vulkan(), TOLERANCE).max_difference:.2g}")


def test_a_draft_on_the_cpu_changes_no_text_and_overlaps(
    target: Path, fixed_policy: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Draft tokens are verified whether or not that pays, which here is a matter of chance."""
    plain = answered(target, drafter="none")
    for overlap in ("off", "on"):
        caplog.clear()
        with caplog.at_level("DEBUG"):
            found = answered(
                target, draft=str(target), drafter="draft-model", draft_overlap=overlap
            )
        assert found.text == plain.text
        assert found.stats.draft_n_accepted > 0
        weights = [line for line in caplog.messages if "model buffer size" in line]
        assert sum("Vulkan0" in line for line in weights) == 1  # of the target alone


def test_the_device_is_listed_and_others_are_refused(target: Path, open_llama: OpenLlama) -> None:
    done = run(COMMAND, "devices", "--json")
    found = [each for each in json.loads(done.stdout)["devices"] if each["name"] == "vulkan0"]
    assert [(each["runtime"], each["kind"], each["fault"]) for each in found] == [
        ("llamacpp", "gpu", None)
    ]
    assert found[0]["total_bytes"] > 0
    with pytest.raises(UsageError, match="there is no device 'vulkan1'") as caught:
        open_llama("llamacpp", target, providers=("vulkan1",))
    assert "vulkan0 (" in caught.value.remedy


def test_some_layers_on_the_device_score_as_all_and_none(
    on_vulkan: OnVulkan, target: Path, open_llama: OpenLlama, scores: Any
) -> None:
    expected = scores(open_llama("llamacpp", target, providers=("cpu",)).open_session(), [1, 2, 3])
    for layers in (0, 1, 2, None):
        found = scores(on_vulkan(gpu_layers=layers).open_session(), [1, 2, 3])
        assert abs(found - expected).max() < TOLERANCE


OPENED = """
import json, logging, sys
from pathlib import Path
from edge_spec.core.model import RuntimeOptions
from edge_spec.models import runtimes

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
runtime, source = runtimes.load_runtime("llamacpp"), runtimes.open_model_info(Path(sys.argv[1]))
options = RuntimeOptions(threads=1, providers=tuple(sys.argv[2:]))
print("forecast", json.dumps(dict(runtime.memory(source, options).on_devices)))
runtime.open(source, options).open_session()
"""


@pytest.mark.parametrize(
    ("named", "used"), [((), {0: "vulkan0", 2: "vulkan1"}), (("vulkan1",), {0: "vulkan1"})]
)
def test_of_two_devices_both_are_used_or_the_one_that_is_named(
    named: tuple[str, ...], used: dict[int, str], target: Path
) -> None:
    """The same device twice. What the library says that it takes there is what was forecast, at
    most: of this model, buffers are most of it."""
    done = run(OPENED, str(target), *named, GGML_VK_VISIBLE_DEVICES="0,0")
    assert done.returncode == 0, done.stderr[-500:]
    [told] = re.findall(r"^forecast (.*)$", done.stdout, re.MULTILINE)
    forecast = json.loads(told)
    assert set(forecast) == set(used.values())
    placed = dict(re.findall(r"layer +(\d+) assigned to device (\w+)", done.stdout))
    for layer, device in used.items():
        assert placed[str(layer)].lower() == device
    taken: Counter[str] = Counter()
    sizes = r"(Vulkan\d) (?:model|KV|compute) buffer size = +([\d.]+) MiB"
    for device, size in re.findall(sizes, done.stdout):
        taken[device.lower()] += float(size) * 2**20
    for device, num_bytes in forecast.items():
        assert 0 < taken[device] <= num_bytes


SHORT_OF_MEMORY = """
import sys
from pathlib import Path
from edge_spec.models import runtimes
from edge_spec.errors import EdgeSpecError
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree

try:
    options = RuntimeOptions(threads=1, providers=("vulkan0",))
    model = runtimes.load_runtime("llamacpp").open(
        runtimes.open_model_info(Path(sys.argv[1])), options
    )
    session = model.open_session()
    session.prefill([1, 2, 3])
    before = session.forward(TokenTree.chain(1)).logits.copy()
    for _ in range(2):
        try:
            session.prefill([1] * 1_000_000)  # room for them is made before any is scored
        except EdgeSpecError as error:
            print(f"{type(error).__name__}: {error}")
        assert session.length == 3
        assert (session.forward(TokenTree.chain(1)).logits == before).all()
except EdgeSpecError as error:
    print(f"at once {type(error).__name__}: {error}")
"""


def test_too_little_memory_is_one_line_at_load_and_at_growth(tmp_path: Path, tiny: Any) -> None:
    """The backend is told to make no buffer of more bytes: a cache of a million tokens takes 256
    MB, the output of this model 64 KB."""
    model = tiny.build("llama", max_position_embeddings=2**20)
    path = str(tiny.write_gguf(model, tmp_path / "model.gguf"))
    grown = run(SHORT_OF_MEMORY, path, GGML_VK_FORCE_MAX_BUFFER_SIZE=str(2**24))
    assert grown.returncode == 0, grown.stderr[-500:]
    lines = grown.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("DeviceMemoryError: Vulkan0 has too little memory for a cache of")
    loaded = run(SHORT_OF_MEMORY, path, GGML_VK_FORCE_MAX_BUFFER_SIZE="1000")
    assert loaded.stdout.startswith("at once DeviceMemoryError: Vulkan0 has too little memory for")
    assert loaded.stdout.count("\n") == 1


LOST = """
import os, sys
from pathlib import Path
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError
from edge_spec.models import runtimes

runtime, source = runtimes.load_runtime("llamacpp"), runtimes.open_model_info(Path(sys.argv[1]))
on_cpu = runtime.open(source, RuntimeOptions(threads=1, providers=("cpu",))).open_session()
model = runtime.open(source, RuntimeOptions(threads=1, providers=("vulkan0",)))
one, other = model.open_session(), model.open_session()
for session in (on_cpu, one, other):
    session.prefill([1, 2, 3])
before = on_cpu.forward(TokenTree.chain(1)).logits.copy()
one.forward(TokenTree.chain(1))
Path(os.environ["LOSE_DEVICE"]).touch()
for session in (one, one, other):
    try:
        session.forward(TokenTree.chain(2))
    except DeviceError as error:
        print(error)
assert (on_cpu.forward(TokenTree.chain(1)).logits == before).all()
model.close()
print("survived")
"""


def test_a_device_that_is_lost_is_an_error_of_its_conversations(
    target: Path, tmp_path: Path
) -> None:
    """The driver says so of every submission from then on, as a real one does."""
    shim = tmp_path / "lose_device.so"
    source = Path(__file__).with_name("lose_device.c")
    command = ["cc", "-shared", "-fPIC", "-o", shim, source, "-Wl,--no-as-needed"]
    subprocess.run([*command, "-l:libvulkan.so.1", "-ldl"], check=True)
    done = run(LOST, str(target), LD_PRELOAD=str(shim), LOSE_DEVICE=str(tmp_path / "lost"))
    assert done.returncode == 0, done.stderr[-500:]
    *told, last = done.stdout.splitlines()
    assert last == "survived" and len(told) == 3
    assert all(line.startswith("llama.cpp has lost a device: ") for line in told)
