"""A model that something installed can run is run, and what cannot work is said from its header."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf as gguf_format
import pytest
from pydantic import TypeAdapter

from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.cli.main import run
from edge_spec.core.export import ExportOptions
from edge_spec.diagnostics.bench.measuring import make_plan
from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
from edge_spec.errors import (
    DeviceMemoryError,
    EdgeSpecError,
    ModelFileError,
    UnsupportedModelError,
)
from edge_spec.fitting.devices import Device
from edge_spec.loader import load_engine, place
from edge_spec.loader.place import place_models
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.runtime_choice import candidates_for, choose_runtime
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidates
from edge_spec.placement.machine import cpu_name
from edge_spec.placement.profile import ContextCosts, Profile, ProfileKey, save_profile
from edge_spec.placement.row_findings import rows_key
from edge_spec.placement.runtime_order import RuntimeOrder, missing_reader, runtime_order
from edge_spec.runtimes.llamacpp import LlamaCppModel, LlamaCppRuntime
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.storage.json_store import KeptFile
from edge_spec.text.prompt_files import Prompt
from fixtures import family_gguf
from fixtures.silence import quiet

pytest.importorskip("onnxruntime")
pytest.importorskip("llama_cpp")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def other(tiny: ModuleType, tmp_path: Path) -> Path:
    return Path(tiny.write_other(tmp_path / "other.gguf"))


@pytest.fixture
def base_model(tiny: ModuleType, tmp_path: Path) -> Path:
    return Path(tiny.write_other(tmp_path / "base.gguf", template=False))


@pytest.fixture
def closed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(self: LlamaCppModel, *given: Any) -> None:
        raise AssertionError("its weights were read")

    monkeypatch.setattr(LlamaCppModel, "__init__", opened)


@pytest.fixture
def named(tmp_path: Path, tiny: ModuleType) -> Callable[..., Path]:
    """named(architecture, **metadata): a file of that architecture with one matrix."""

    def write(architecture: str, **metadata: Any) -> Path:
        path = tmp_path / "named.gguf"
        writer = gguf_format.GGUFWriter(path, architecture)
        tiny._add_metadata(writer, tiny.build())
        for key, value in metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            add[type(value)](key.replace("__", "."), value)
        writer.add_tensor("token_embd.weight", tiny.build().weights["model.embed_tokens.weight"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def order_of(source: Source, **asked: Any) -> RuntimeOrder:
    options = LoadOptions(**asked)
    candidates = candidates_for(source, options.runtime, options)
    return runtime_order(candidates, options.runtime_options)


def refusal(path: Path, runtime: str = "auto") -> EdgeSpecError:
    with pytest.raises(EdgeSpecError) as caught:
        choose_runtime(Source(str(path), quiet), runtime, LoadOptions())
    assert "\n" not in str(caught.value)
    return caught.value


def refuse(self: LlamaCppRuntime, source: Any) -> None:
    raise UnsupportedModelError("not this one", remedy="Another.")


def keep_conversion(source: Source, bundle: Bundle) -> None:
    """As if somebody had run it with --runtime ort."""
    kept = source.cached("onnx", ExportOptions())
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.symlink_to(bundle.path, target_is_directory=True)


def test_what_the_first_runtime_cannot_run_runs_on_the_next(
    gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCppRuntime, "require_runnable", refuse)
    with load_engine(str(gguf()), LoadOptions(threads=1, drafter="none"), quiet) as engine:
        assert engine.runtime == "ort"
        assert len(engine.generate([5, 6, 7], max_tokens=4).tokens) == 4
    [told] = [each for each in caplog.messages if "cannot run" in each]
    assert told.startswith("llamacpp cannot run ") and told.endswith(": ort runs it")


def test_a_draft_runs_as_it_is_beside_a_bundle(
    other: Path, exported: Callable[..., Bundle], cache: Path
) -> None:
    options = LoadOptions(threads=1, draft=(str(other),))
    with load_engine(str(exported().path), options, quiet) as engine:
        assert engine.runtime == "ort"
        assert len(engine.parts.drafts) == 1
        assert len(engine.generate([5, 6, 7], max_tokens=4).tokens) == 4
    assert not (cache / "bundles").exists()


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_file_runs_as_it_is_on_whatever_reads_it(
    family: str,
    gguf: Callable[..., Path],
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the runtime that would convert it is asked first otherwise."""
    plain = family == "llama"
    path = gguf() if plain else family_gguf.write_gguf(family, tmp_path / "model.gguf")
    source = Source(str(path), quiet)
    assert order_of(source).reason == "llamacpp reads the file as it is"
    monkeypatch.setattr(runtimes, "AUTO_RUNTIMES", runtimes.AUTO_RUNTIMES[::-1])
    assert order_of(source).names[0] == "llamacpp"
    assert place_models(source, LoadOptions()).target.runtime.name == "llamacpp"
    assert not (cache / "bundles").exists()


def test_a_conversion_that_is_there_goes_before_one_that_is_not(
    hf: Callable[..., Path], exported: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no header, either."""
    source = Source(str(hf()), quiet)
    keep_conversion(source, exported())
    monkeypatch.setattr(runtimes, "open_checkpoint", None)
    order = order_of(source)
    assert order.candidates.choose().runtime.name == "ort"
    assert order.reason == "ort has its conversion"


def test_the_second_start_chooses_as_the_first(hf: Callable[..., Path]) -> None:
    """Neither a conversion nor what the first start has measured is a reason to change."""
    chosen = []
    for _ in range(2):
        with load_engine(str(hf()), LoadOptions(threads=1), quiet) as engine:
            chosen.append(engine.runtime)
            engine.generate([5, 6, 7], max_tokens=4)
    assert chosen == ["llamacpp", "llamacpp"]


def test_without_llama_cpp_a_file_is_converted_and_its_reader_is_named(
    gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda module: module == "onnxruntime" or None)
    order = order_of(Source(str(gguf()), quiet))
    assert order.names == ("ort",)
    assert order.better.endswith('pip install "edge-spec[llamacpp]"')


def test_the_runtime_that_was_asked_for_is_not_exchanged(other: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is a 'internlm2' model"):
        load_engine(str(other), LoadOptions(runtime="ort"), quiet)


def test_without_llama_cpp_its_install_command_is_named(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda module: module == "onnxruntime" or None)
    error = refusal(other)
    assert "is a 'internlm2' model, which ort cannot run" in error.message
    assert error.remedy.startswith('Run: pip install "edge-spec[llamacpp]"')


def test_an_architecture_that_nothing_knows_is_one_line(
    named: Callable[..., Path], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = named("nonesuch")
    error = refusal(path)
    assert isinstance(error, UnsupportedModelError)
    assert "ort: " in error.message
    assert "llama.cpp does not know the architecture 'nonesuch'" in error.message
    before = sorted(path.parent.iterdir())
    assert run(["generate", str(path), "hello"]) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line == f"edge-spec: {error}"
    assert sorted(path.parent.iterdir()) == before
    assert not cache.exists()


def test_damage_is_no_reason_to_try_another(other: Path) -> None:
    other.write_bytes(other.read_bytes()[:-5000])
    error = refusal(other)
    assert isinstance(error, ModelFileError)
    assert "ends beyond the end of the file" in error.message


def test_too_little_memory_is_no_reason_to_try_another(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise DeviceMemoryError("too little", remedy="More.")

    runtime = type(runtimes.load_runtime("llamacpp"))
    monkeypatch.setattr(runtime, "require_runnable", refuse)
    assert isinstance(refusal(other), DeviceMemoryError)


@pytest.mark.parametrize("runtime", ["auto", "llamacpp"])
@pytest.mark.parametrize(
    ("architecture", "metadata", "told"),
    [
        ("bert", {"bert__attention__causal": False}, "embeds text"),
        ("qwen3", {"qwen3__pooling_type": 3}, "embeds text"),
        ("clip", {}, "reads pictures"),
        ("internlm2", {"general__type": "mmproj"}, "reads pictures"),
        ("llama", {"general__type": "adapter"}, "a LoRA adapter"),
    ],
)
def test_models_that_do_not_write_are_refused_from_their_header(
    architecture: str,
    metadata: dict[str, Any],
    told: str,
    runtime: str,
    named: Callable[..., Path],
    closed_weights: None,
) -> None:
    with pytest.raises(UnsupportedModelError, match=told) as caught:
        load_engine(str(named(architecture, **metadata)), LoadOptions(runtime=runtime), quiet)
    assert str(caught.value).count(told) == 1


@pytest.mark.parametrize("architecture", ["llama", "internlm2"])
def test_a_vocabulary_alone_is_refused(
    architecture: str, tiny: ModuleType, tmp_path: Path, closed_weights: None
) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = gguf_format.GGUFWriter(path, architecture)
    tiny._add_metadata(writer, tiny.build())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="a vocabulary and no weights"):
        load_engine(str(path), LoadOptions(), quiet)


def test_chat_without_a_template_is_refused_before_the_weights_are_read(
    base_model: Path, closed_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", str(base_model)]) == 1
    told = capfd.readouterr().err.splitlines()[-1]
    assert "has no chat template" in told and "generate --raw" in told


def test_chat_without_a_template_is_refused_before_anything_that_takes_long(
    base_model: Path, hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file before a runtime is asked or a tokenizer made, a directory before it is converted."""
    directory = Path(shutil.copytree(hf(), tmp_path / "base"))
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        place_models(Source(str(directory), quiet), LoadOptions(), needs_chat=True)
    assert not list((tmp_path / "cache").rglob("model.onnx*"))
    monkeypatch.setattr(place, "prepare_model", None)  # would be called
    for runtime in ("auto", "llamacpp"):
        with pytest.raises(UnsupportedModelError, match="no chat template"):
            place_models(Source(str(base_model), quiet), LoadOptions(runtime=runtime), True)


def test_a_header_is_read_once(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    open_info = runtimes.open_model_info
    monkeypatch.setattr(
        runtimes, "open_model_info", lambda path: read.append(path) or open_info(path)
    )
    place_models(Source(str(other), quiet), LoadOptions(), needs_chat=True)
    assert read == [other]


def test_a_prompt_that_does_not_fit_is_refused_before_the_weights_are_read(
    base_model: Path, closed_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(base_model), "hello " * 300, "--raw", "--context", "64"]) == 2
    assert "the context holds 64" in capfd.readouterr().err


def test_generate_without_a_template_continues_the_prompt(
    base_model: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--max-tokens", "6", "--threads", "1", "--json"]
    texts = {}
    for raw in ([], ["--raw"]):
        assert run(["generate", str(base_model), "hello", *raw, *options]) == 0
        texts[bool(raw)] = json.loads(capfd.readouterr().out)["text"]
        told = [each for each in caplog.messages if "the prompt is continued as it is" in each]
        assert len(told) == 1  # of the two, only where nothing says it is meant
    assert texts[True] == texts[False]


def test_bench_continues_prompts_without_a_template(base_model: Path) -> None:
    options = LoadOptions(threads=1, drafter="none")
    with load_engine(str(base_model), options, quiet) as engine:
        plan = make_plan(engine, [Prompt("1", "math", "hello")], max_tokens=4, repetitions=1)
        assert list(plan.tasks[0].tokens) == engine.encode("hello")


def test_the_server_completes_texts_and_refuses_chats_without_a_template(base_model: Path) -> None:
    import httpx

    options = LoadOptions(threads=1, drafter="none")
    with (
        load_engine(str(base_model), options, quiet) as engine,
        RunningServer(engine, ServerOptions(port=0, parallel=1)) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        asked = {"prompt": "hello", "max_tokens": 4}
        assert client.post("/v1/completions", json=asked).status_code == 200
        messages = {"messages": [{"role": "user", "content": "hello"}]}
        refused = client.post("/v1/chat/completions", json=messages)
        assert refused.status_code == 400, refused.text
        assert "no chat template" in refused.json()["error"]["message"]


def test_a_draft_that_nothing_runs_is_refused_before_the_target_is_converted(
    hf: Callable[..., Path], named: Callable[..., Path], cache: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing that is installed can run named"):
        load_engine(str(hf()), LoadOptions(draft=(str(named("nonesuch")),)), quiet)
    assert not (cache / "bundles").exists()


def test_a_plan_of_what_nothing_runs_says_all_reasons(named: Callable[..., Path]) -> None:
    devices = [Device(name, "cpu", "cpu", "the processor") for name in ("llamacpp", "ort")]
    source = Source(str(named("nonesuch")), quiet)
    with pytest.raises(UnsupportedModelError, match="nothing that is installed can run named"):
        candidates(source, LoadOptions(), devices, quiet)


def profile_of(model: str, identity: str, weights: str, runtime: str) -> ProfileKey:
    library, kernels = runtimes.library_version(runtime), runtimes.own_kernels(runtime)
    place = (weights, runtime, library, "", None, (), cpu_name(), kernels)
    return ProfileKey(model, identity, *place)


def costs_of(source: Source, runtime: str, weights: str, step_s: float, **changes: Any) -> None:
    """Keeps what passes of models of its shapes cost, as a first start would."""
    profile = profile_of("", "", weights, runtime)
    key = replace(rows_key(profile, source.header.config), **changes)
    content = {"version": 1, "key": asdict(key), "seconds": {"1": step_s, "2": 2 * step_s}}
    kept = KeptFile(key.path, TypeAdapter(dict[str, Any]))
    kept.update(lambda old: content)


@pytest.mark.parametrize(
    ("ort_s", "llamacpp_s", "changes", "chosen"),
    [
        (0.1, 0.2, {}, "ort"),
        (0.2, 0.1, {}, "llamacpp"),
        (0.1, 0.105, {}, "llamacpp"),  # not by a tenth: a conversion changes texts
        (0.1, None, {}, "llamacpp"),  # nothing to compare with
        (0.1, 0.2, {"threads": 7}, "llamacpp"),  # measured otherwise
        (0.1, 0.2, {"library": "0"}, "llamacpp"),
        (0.1, 0.2, {"kernels": "others"}, "llamacpp"),
        (0.1, 0.2, {"shapes": (1, 2)}, "llamacpp"),  # of another model
    ],
)
def test_a_conversion_that_is_there_is_asked_first_where_it_is_known_to_be_faster(
    ort_s: float,
    llamacpp_s: float | None,
    changes: dict[str, Any],
    chosen: str,
    gguf: Callable[..., Path],
    exported: Callable[..., Bundle],
) -> None:
    source = Source(str(gguf()), quiet)
    keep_conversion(source, exported())
    costs_of(source, "ort", exported().manifest.quantization, ort_s)
    if llamacpp_s is not None:
        costs_of(source, "llamacpp", "F32", llamacpp_s, **changes)
    order = order_of(source)
    assert order.names[0] == chosen
    if chosen == "ort":
        assert (
            order.reason == "ort has its conversion and takes 100.0 ms a token here (llamacpp "
            "200.0 ms)"
        )
    assert order_of(source, kv_type="f16").names[0] == "llamacpp"


def test_a_gpu_may_be_many_times_as_fast(
    gguf: Callable[..., Path], exported: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(str(gguf()), quiet)
    keep_conversion(source, exported())
    costs_of(source, "ort", exported().manifest.quantization, 0.1)
    costs_of(source, "llamacpp", "F32", 0.4)
    assert order_of(source).names[0] == "llamacpp"  # on the processor it cannot be
    monkeypatch.setattr(runtimes, "runs_on_processor", lambda runtime: False)
    assert order_of(source).names[0] == "ort"


def test_no_conversion_is_made_to_be_faster_but_named(
    gguf: Callable[..., Path], cache: Path
) -> None:
    told: list[str] = []
    source = Source(str(gguf()), lambda what, fraction: told.append(what))
    costs_of(source, "ort", "int4 block 32", 0.1)
    costs_of(source, "llamacpp", "F32", 0.2)
    assert place_models(source, LoadOptions()).target.runtime.name == "llamacpp"
    [line] = [each for each in told if "ort would be 100% faster here than llamacpp" in each]
    assert "--runtime ort does that once" in line and "\n" not in line
    assert not (cache / "bundles").exists()


@pytest.mark.parametrize(("llamacpp_s", "chosen"), [(0.107, "ort"), (0.104, "llamacpp")])
def test_of_two_conversions_the_one_that_is_known_to_be_faster_is_made(
    llamacpp_s: float, chosen: str, hf: Callable[..., Path], gguf: Callable[..., Path]
) -> None:
    """A 20th is enough: both change the weights."""
    shapes = Source(str(gguf()), quiet)
    costs_of(shapes, "ort", "int4 block 32", 0.1)
    costs_of(shapes, "llamacpp", "Q4_K", llamacpp_s)
    assert order_of(Source(str(hf()), quiet)).names[0] == chosen


def test_where_the_faster_one_cannot_run_it_the_next_does(
    hf: Callable[..., Path], gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_config(self: OrtRuntime, *given: Any) -> None:
        raise UnsupportedModelError("not this one", remedy="Another.")

    shapes, source = Source(str(gguf()), quiet), Source(str(hf()), quiet)
    costs_of(shapes, "ort", "int4 block 32", 0.1)
    costs_of(shapes, "llamacpp", "Q4_K", 0.2)
    assert order_of(source).names == ("ort", "llamacpp")
    monkeypatch.setattr(OrtRuntime, "require_config", refuse_config, raising=False)
    assert order_of(source).candidates.choose().runtime.name == "llamacpp"


def test_a_profile_of_the_model_says_more_than_costs_of_its_shapes(
    gguf: Callable[..., Path], exported: Callable[..., Bundle]
) -> None:
    source = Source(str(gguf()), quiet)
    keep_conversion(source, exported())
    weights = exported().manifest.quantization
    for runtime, stored, shape_s, own_s in (
        ("ort", weights, 0.2, 0.1),
        ("llamacpp", "F32", 0.1, 0.2),
    ):
        costs_of(source, runtime, stored, shape_s)
        profile = Profile((ContextCosts(32, {1: own_s}),), 1.0, 0.0, 0.0, rounds=3, spread=0.0)
        save_profile(profile_of(source.name, source.identity, stored, runtime), profile)
    assert order_of(source).names == ("ort", "llamacpp")
    assert not order_of(source, quantization="int8").seconds
    assert not order_of(source, kv_type="f16").seconds


def test_doctor_says_who_is_chosen_and_why(gguf: Callable[..., Path]) -> None:
    source = Source(str(gguf()), quiet)
    costs_of(source, "ort", "int4 block 32", 0.1)
    costs_of(source, "llamacpp", "F32", 0.2)
    report = diagnose(DiagnosisRequest(source.model), quiet, devices=list)
    reason, better = (each for each in report.grouped["target"] if each.check == "runtime")
    assert reason.found.startswith("llamacpp reads the file as it is and takes 200.0 ms")
    assert better.found.startswith("ort would be 100% faster here than llamacpp (100.0 for 200.0")


def test_doctor_names_a_better_runtime_that_is_not_installed(
    gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = runtimes.AUTO_RUNTIMES[1:]
    monkeypatch.setattr(runtimes, "AUTO_RUNTIMES", installed)
    report = diagnose(DiagnosisRequest(str(gguf())), quiet, devices=list)
    found = [each.found for each in report.grouped["target"] if each.check == "runtime"]
    assert found == [missing_reader(Source(str(gguf()), quiet))]
    assert "is not installed" in found[0]
