"""Core AI programs, which Apple's own runtime for Linux runs here: they score as the reference
does, draft and verify without changing a text, and what cannot be written or run is refused."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import pytest

from edge_spec import load
from edge_spec.cli.main import run
from edge_spec.core.export import ExportOptions
from edge_spec.core.isolated import IsolatedError, reason_of
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import (
    BundleError,
    DeviceError,
    EdgeSpecError,
    ExportError,
    MissingDependencyError,
    StorageError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.coreai import CoreAiExporter
from edge_spec.exporters.coreai import export as export_module
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader import load_engine
from edge_spec.models import core_ai
from edge_spec.models.bundle import MANIFEST, ROLES, Bundle, open_bundle, write_manifest
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_export import PairPart, choices_for, export_pair
from edge_spec.models.source import Source
from edge_spec.runtimes.coreai import CoreAiRuntime
from edge_spec.runtimes.coreai.native import NativeProgram
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.scheduler.policy import AlwaysVerifyPolicy
from fixtures import families, tiny_models
from fixtures.silence import quiet

ROOT = Path(__file__).parents[2]
CONTEXT = 100  # tokens, in 128 slots
WIDE = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}  # rows of whole blocks
# Of logits whose standard deviation is 2 to 3: embedding and head of a Q4_0 file have 8 bits here.
# A wrong level, scale or nibble moves them by 0.3 and more.
ROUNDED = 0.1
NOISE = 0.12  # of a matrix's standard deviation: half of what it drafts is right

Checkpoint = Callable[..., Any]
Tokens = Callable[..., list[int]]
here = pytest.mark.usefixtures("core_ai_here")


@pytest.fixture(scope="module")
def core_ai_here() -> None:
    """Skips where the library is not installed, or does not run."""
    pytest.importorskip("coreai")
    if (problem := core_ai.running_problem()) is not None:
        pytest.skip(problem)


def export(source: Any, out: Path, quantization: str = "fp32", **options: Any) -> Bundle:
    asked = ExportOptions(quantization, **{"context_length": CONTEXT, "check": False} | options)
    CoreAiExporter().export(source, out, asked, quiet)
    return open_bundle(out)


def opened(bundle: Bundle, **options: Any) -> Any:
    return CoreAiRuntime().open(bundle, RuntimeOptions(**options))


@pytest.fixture(scope="module")
def bundle(
    core_ai_here: None, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    return export(checkpoint("llama"), tmp_path_factory.mktemp("coreai") / "bundle", check=True)


@pytest.fixture(scope="module")
def nearly_right(core_ai_here: None, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model with noise on its matrices: as a draft, it is right now and then."""
    model, random = tiny_models.build("llama"), np.random.RandomState(1)
    weights = {
        name: (each + NOISE * each.std() * random.standard_normal(each.shape)).astype(np.float32)
        if each.ndim == 2
        else each
        for name, each in model.weights.items()
    }
    folder = tmp_path_factory.mktemp("noised")
    path = tiny_models.write_hf(tiny_models.TinyModel(model.config, weights), folder / "model")
    return export(open_checkpoint(path), folder / "bundle")


@here
@pytest.mark.parametrize("variant", ["llama-tied", "llama-llama3", "qwen2", "qwen3"])
def test_the_program_scores_as_the_reference_does(
    variant: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    tokens: Tokens,
    random_tree: Callable[..., TokenTree],
    side_by_side: ModuleType,
) -> None:
    source = checkpoint(variant)
    model = opened(export(source, tmp_path / "out", hidden_states=True, context_length=96))
    assert model.capabilities.hidden_states and model.capabilities.max_rows == 8
    side_by_side.require_static_scores(model, source, tokens(70), random_tree(7, seed=3))
    model.close()


@here
@pytest.mark.parametrize(
    ("kind", "name", "most"), [("Q8_0", "int8", 1e-3), ("Q4_0", "int4", ROUNDED)]
)
def test_blocks_of_a_gguf_file_are_carried(
    kind: str, name: str, most: float, tmp_path: Path, tokens: Tokens, side_by_side: ModuleType
) -> None:
    path = tiny_models.write_gguf(tiny_models.build("llama", **WIDE), tmp_path / "m.gguf", kind)
    source = open_checkpoint(path)
    written = export(source, tmp_path / "out", name)
    assert written.manifest.quantization == f"{name} block 32"
    model = opened(written)
    sessions = (model.open_session(), ReferenceModel(source).open_session())
    both = side_by_side.Both(sessions, most)
    both.prefill(tokens(20))
    both.chain(tokens(5, seed=1))
    model.close()


@here
def test_norms_rotations_and_attention_are_composites(bundle: Bundle) -> None:
    """Under the names that compilers for devices look for; that they compute the same is shown with
    the scores. The library has no public way to read a program."""
    stored = bundle.file("model.aimodel/main.mlirb").read_bytes()
    for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
        assert f"\0{name}\0".encode() in stored


def write_constant(values: Any, path: Path) -> None:
    """A program that returns a constant of 4 bits, added to its input."""
    from coreai import authoring as ops
    from coreai.authoring.constant import constant

    from edge_spec.exporters.coreai.private import constant_of_4_bits

    given = np.array([values], np.int8)

    def body(added: Any) -> Any:
        scale, zero = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
        levels, middle = constant_of_4_bits(given), constant_of_4_bits(zero.astype(np.int8))
        read = ops.blockwise_shift_scale(levels, constant(scale), middle, constant(zero))
        return ops.broadcasting_add(added, read)

    body.__annotations__ = {
        "added": Annotated[ops.Value, ops.TensorSpec((1, 1), np.float32)],
        "return": Annotated[ops.Value, ops.TensorSpec(given.shape, np.float32, name="read")],
    }
    module = ops.Module.create()
    with module:
        ops.graph(body, provided_name="main")
    ops.AIProgram(module).save_asset(path)


@here
@pytest.mark.parametrize(
    "values", [range(-8, 8), [-3] * 16, [0] * 16, [1, 2] * 8, [0, -8] * 8, [7, -1, 3]]
)
def test_constants_of_4_bits_are_read_as_they_were_given(values: Any, tmp_path: Path) -> None:
    """Also those whose bytes are all alike, which are stored as one."""
    write_constant(values, tmp_path / "four.aimodel")
    program = NativeProgram(tmp_path / "four.aimodel", None)
    found = program.predict("main", {"added": np.zeros((1, 1), np.float32)}, {})["read"].copy()
    program.close()
    np.testing.assert_array_equal(found, [list(values)])


SAME_TEXT = {
    "suffix": {"drafter": "suffix"},
    "draft": {"drafter": "draft-model"},
    "tree": {"drafter": "recycling", "lossless": "ties"},  # else passes are chains
}


@here
@pytest.mark.parametrize("drafter", SAME_TEXT)
def test_texts_are_those_of_the_reference(
    drafter: str,
    bundle: Bundle,
    nearly_right: Bundle,
    hf: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Target and draft both on Core AI."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = dict(SAME_TEXT[drafter])
    if drafter == "draft":
        options |= {"draft": str(nearly_right.path), "draft_runtime": "coreai"}
    texts = []
    for model, runtime in ((str(hf()), "reference"), (str(bundle.path), "coreai")):
        chosen = options if runtime == "coreai" else {"drafter": "none"}
        asked = LoadOptions(runtime=runtime, context_length=CONTEXT, **chosen)
        with (
            load_engine(model, asked, quiet) as engine,
            engine.verifying_all_draft_tokens() as exercised,
        ):
            result = engine.generate("the end the end", max_tokens=40)
            texts.append([token.id for token in result.tokens])
    assert texts[0] == texts[1] and len(texts[0]) == 40
    assert result.stats.draft_n > result.stats.draft_n_accepted
    assert drafter != "draft" or result.stats.draft_n_accepted > 0
    assert drafter != "tree" or exercised[AlwaysVerifyPolicy.BRANCHES] > 0


@here
@pytest.mark.parametrize("drafter", SAME_TEXT)
def test_verify_passes_where_drafts_are_accepted_and_rejected(
    drafter: str,
    bundle: Bundle,
    nearly_right: Bundle,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    prompts = ["the end the end", "Monday, Tuesday, Monday,", "a b c a b c", "the sea is blue"]
    prompts += ["one two one two one", "to be or not to be", "x y x y x z", "no no no yes no no"]
    draft = nearly_right if drafter == "draft" else None
    report = verified(bundle, draft, drafter, prompts, 40, tmp_path, capsys)
    assert report["verdict"] == "pass"


def verified(
    target: Bundle,
    draft: Bundle | None,
    drafter: str,
    prompts: list[str],
    max_tokens: int,
    directory: Path,
    capsys: Any,
) -> Any:
    """What `edge-spec verify` reports of greedy texts, which all are plain ones."""
    file = directory / "prompts.txt"
    file.write_text("\n".join(prompts), "utf-8")
    options = [part for name, value in SAME_TEXT[drafter].items() for part in (f"--{name}", value)]
    if draft is not None:
        options += ["--draft", str(draft.path), "--draft-runtime", "coreai"]
    options += ["--runtime", "coreai", "--prompts", str(file), "--max-tokens", str(max_tokens)]
    assert run(["verify", str(target.path), *options, "--draws", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    greedy = report["greedy"]
    assert greedy["differing"] == [] and greedy["num_accepted"] > 4 and greedy["num_rejected"] > 4
    assert (greedy["num_branching"] > 0) == (drafter == "tree")
    assert drafter == "tree" or report["promise"] == "bit-identical"
    return report


def refused(error: type[EdgeSpecError], call: Callable[[], Any], text: str, where: Path) -> None:
    """In one line, before anything is written."""
    before = sorted(where.iterdir())
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert sorted(where.iterdir()) == before


@pytest.mark.parametrize(
    ("quantization", "options", "error", "text"),
    [
        ("fp16", {}, UsageError, "unknown quantization 'fp16'.*int8, int4, fp32"),
        ("fp32", {"context_length": 0}, UsageError, "context of 0 tokens"),
        ("fp32", {"context_length": 129}, UsageError, "Choose 1 to 128"),
        ("fp32", {"num_layers": 3}, UsageError, "2 layers"),
        ("fp32", {"compute": "ane"}, UsageError, "no option compute"),
    ],
)
def test_what_cannot_be_written_is_refused_before_it_is(
    quantization: str,
    options: Any,
    error: type[EdgeSpecError],
    text: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_module, "require_writing", lambda: None)
    source = checkpoint("llama")
    refused(
        error, lambda: export(source, tmp_path / "out", quantization, **options), text, tmp_path
    )


def test_rows_of_no_whole_blocks_are_refused_with_what_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "require_writing", lambda: None)
    model = tiny_models.build("llama", intermediate_size=72)
    source = open_checkpoint(tiny_models.write_hf(model, tmp_path / "model"))
    text = "rows of 72 weights are not whole blocks.*--quant fp32"
    refused(UnsupportedModelError, lambda: export(source, tmp_path / "out", "int4"), text, tmp_path)


def test_a_state_that_holds_no_such_context_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "require_writing", lambda: None)
    monkeypatch.setattr(export_module, "_MAX_STATE_BYTES", 1 << 15)
    source = checkpoint("llama")
    refused(UsageError, lambda: export(source, tmp_path / "out"), "smaller --context", tmp_path)


@pytest.mark.parametrize(
    ("system", "machine", "library", "macos", "text"),
    [
        ("linux", "x86_64", ("glibc", "2.31"), "", "needs Linux with glibc 2.34.*glibc 2.31"),
        ("linux", "x86_64", ("", ""), "", "needs Linux with glibc 2.34.*another C library"),
        ("linux", "aarch64", ("glibc", "2.41"), "", "this is linux on aarch64"),
        ("win32", "AMD64", ("", ""), "", "this is win32 on AMD64"),
        ("darwin", "arm64", ("", ""), "15.7", "needs macOS 2[67] on Apple silicon, this is 15.7"),
        ("darwin", "x86_64", ("", ""), "26.0", "this is 26.0 on x86_64"),
    ],
)
def test_systems_without_core_ai_are_refused(
    system: str,
    machine: str,
    library: tuple[str, str],
    macos: str,
    text: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
    source = checkpoint("llama")
    refused(DeviceError, lambda: export(source, tmp_path / "out"), text, tmp_path)
    refused(DeviceError, lambda: CoreAiRuntime().require_devices(()), text, tmp_path)


def test_macos_26_writes_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(core_ai, "version", lambda name: core_ai.VERSION)
    core_ai.require_writing()
    with pytest.raises(DeviceError, match=r"needs macOS 27 on Apple silicon, this is 26\.1"):
        core_ai.require_running()


def test_another_version_of_the_library_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_ai, "_system_problem", lambda least_macos: None)
    monkeypatch.setattr(core_ai, "version", lambda name: "1.0.0")
    text, source = r"coreai-core 1\.0\.0 is installed.*==1\.0\.0b3", checkpoint("llama")
    error = MissingDependencyError
    refused(error, lambda: export(source, tmp_path / "out"), text, tmp_path)
    refused(error, lambda: CoreAiRuntime().devices(RuntimeOptions()), text, tmp_path)


def test_the_version_is_that_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for each in extra["optional-dependencies"]["coreai"]:
        assert each.startswith(f"{core_ai.LIBRARY}=={core_ai.VERSION};")


@here
def test_a_program_whose_state_is_refused_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another version knew the state by another name."""
    from edge_spec.exporters.coreai import private

    def in_this_process(call: Callable[..., Any], *arguments: str, **_: Any) -> Any:
        try:
            return call(*arguments)
        except EdgeSpecError as error:
            raise IsolatedError(reason_of(error)) from error

    monkeypatch.setattr(export_module, "isolated", in_this_process)
    monkeypatch.setattr(private, "_STATE", "MutableBuffers.another_name")
    source = checkpoint("llama")
    text = "Core AI does not take the program: .*takes input_ids.*kv_cache"
    refused(ExportError, lambda: export(source, tmp_path / "out"), text, tmp_path)


def test_a_process_that_dies_is_an_error_in_one_line(tmp_path: Path) -> None:
    """Some mistakes in a program kill the process that reads it."""
    call = lambda: export_module._run_isolated(lambda done: None, os.abort)  # noqa: E731
    refused(ExportError, call, "Core AI does not take the program: .*--format coreml", tmp_path)


@here
def test_a_disk_that_fills_leaves_what_was_there(
    bundle: Bundle, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    shutil.copytree(bundle.path, tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = checkpoint("llama")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        refused(StorageError, lambda: export(source, tmp_path / "out"), "too large", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    open_bundle(tmp_path / "out")


@here
@pytest.mark.parametrize("change", ["half", "gone", "another"])
def test_a_damaged_program_is_named(change: str, bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    folder = tmp_path / "bundle" / "model.aimodel"
    if change == "half":
        content = (folder / "main.mlirb").read_bytes()
        (folder / "main.mlirb").write_bytes(content[: len(content) // 2])
    else:
        shutil.rmtree(folder)
        (tmp_path / "bundle" / MANIFEST).unlink()
    if change == "another":
        write_constant([1, 2], folder)
    if change != "half":
        write_manifest(tmp_path / "bundle", **dict(bundle.manifest))
    call = lambda: opened(open_bundle(tmp_path / "bundle"))  # noqa: E731
    refused(BundleError, call, r"model\.aimodel", tmp_path)


@here
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"kv_type": "f16"}, UsageError, "coreai has no option kv-type"),
        ({"providers": ("cuda",)}, UsageError, "coreai has no device cuda.*cpu, gpu, ane"),
        ({"providers": ("gpu", "ane")}, UsageError, "coreai has no device gpu, ane"),
        ({"context_length": 101}, UsageError, "holds 100 tokens, not 101"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: Any, error: type[EdgeSpecError], text: str, bundle: Bundle, tmp_path: Path
) -> None:
    refused(error, lambda: opened(bundle, **options), text, tmp_path)


@here
@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has others")
def test_on_linux_there_is_one_device(bundle: Bundle, tmp_path: Path) -> None:
    (device,) = CoreAiRuntime().devices(RuntimeOptions())
    assert (
        device.name == "cpu" and device.fault is None and "to check programs" in device.description
    )
    refused(DeviceError, lambda: opened(bundle, providers=("ane",)), "no ane on Linux", tmp_path)
    opened(bundle, providers=("cpu",)).close()


@here
def test_a_bundle_of_another_format_is_refused(
    exported: Callable[..., Bundle], tmp_path: Path
) -> None:
    text = "format onnx, not coreai"
    refused(UsageError, lambda: opened(exported()), text, tmp_path)


@here
def test_a_pair_for_ios_is_written_as_core_ai(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    path = tiny_models.write_hf(tiny_models.build("llama", **WIDE), tmp_path / "model")
    target = PairPart(Source(str(path), quiet))
    asked = ExportOptions(context_length=CONTEXT, check=False)
    choices, draft = choices_for("ios", format="coreai"), replace(target, num_layers=1)
    made = export_pair(target, draft, choices, tmp_path / "pair", quiet, asked)
    variants = [(role, each) for role, member in made.members() for each in member.variants]
    assert [(role, each.format, each.quantization, each.path) for role, each in variants] == [
        (role, "coreai", "int8 block 32", f"{role}/coreai") for role in ROLES
    ]
    assert made.kind == "ios"
    texts = []
    for drafter in ("none", "draft-model"):
        with load(str(tmp_path / "pair"), runtime="coreai", drafter=drafter) as engine:
            result = engine.generate("the end the end", max_tokens=16)
            texts.append([token.id for token in result.tokens])
    assert result.stats.draft_n > 0 and texts[0] == texts[1]


def test_a_pair_of_another_family_names_what_core_ai_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "require_writing", lambda: None)
    path = families.write_hf("granite", tmp_path / "model")
    target, choices = PairPart(Source(str(path), quiet)), choices_for("ios", format="coreai")
    call = lambda: export_pair(target, None, choices, tmp_path / "pair", quiet)  # noqa: E731
    refused(ExportError, call, "target coreai is left out.*residual scale", tmp_path)


@pytest.fixture(scope="module")
def demo(core_ai_here: None, demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("demo") / "bundle"
    return export(open_checkpoint(demo_gguf), folder, context_length=256)


@pytest.mark.model
@pytest.mark.slow
@here
@pytest.mark.parametrize("drafter", SAME_TEXT)
def test_texts_of_the_demo_model_are_plain_ones(
    drafter: str,
    demo: Bundle,
    demo_gguf: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    draft = None
    if drafter == "draft":
        source = open_checkpoint(demo_gguf)
        draft = export(source, tmp_path / "draft", context_length=256, num_layers=27)  # of 30
    prompts = ["Repeat: one two three one two three one two", "Monday, Tuesday, Monday, Tuesday,"]
    prompts += ["1, 2, 3, 4, 5,", "the sea is blue and the"]
    verified(demo, draft, drafter, prompts, 12, tmp_path, capsys)
