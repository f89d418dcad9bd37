"""A model that something installed can run is run, and what cannot work is said from its header."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf as gguf_format
import pytest

from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.cli.main import run
from edge_spec.errors import (
    DeviceMemoryError,
    EdgeSpecError,
    ModelFileError,
    UnsupportedModelError,
)
from edge_spec.loader import load_engine, open_engine
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.models.model_plan import ModelPlan, choose, ways_to_run
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.runtimes.llamacpp import LlamaCppModel, LlamaCppRuntime
from edge_spec.scheduler.engine_plan import plan_engine, rank_ways
from fixtures import family_gguf
from fixtures.silence import quiet

pytest.importorskip("onnxruntime")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.usefixtures("cache")


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


def ranked(source: Source) -> list[ModelPlan]:
    return rank_ways(ways_to_run(source))


def refusal(path: Path) -> EdgeSpecError:
    with pytest.raises(EdgeSpecError) as caught:
        choose(ways_to_run(Source(str(path), quiet)))
    assert "\n" not in str(caught.value)
    return caught.value


def refuse(self: LlamaCppRuntime, source: Any) -> None:
    raise UnsupportedModelError("not this one", remedy="Another.")


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
    assert ranked(source)[0].why == "it reads the file as it is"
    monkeypatch.setattr(runtimes, "AUTO_RUNTIMES", runtimes.AUTO_RUNTIMES[::-1])
    assert ranked(source)[0].name == "llamacpp"
    with load_engine(str(path), LoadOptions(), quiet) as engine:
        assert engine.runtime == "llamacpp"
    assert not (cache / "bundles").exists()


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
    [plan] = plan_engine(Source(str(gguf()), quiet), LoadOptions())
    assert plan.target.name == "ort"
    assert plan.explain()[2].endswith('pip install -e ".[llamacpp]"')


def test_the_runtime_that_was_asked_for_is_not_exchanged(other: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is a 'internlm2' model"):
        load_engine(str(other), LoadOptions(runtime="ort"), quiet)


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


def test_chat_without_a_template_is_refused_before_anything_that_takes_long(
    base_model: Path, hf: Callable[..., Path], tmp_path: Path
) -> None:
    """A directory before it is converted."""
    directory = Path(shutil.copytree(hf(), tmp_path / "base"))
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        open_engine(plan_engine(Source(str(directory), quiet), LoadOptions()), needs_chat=True)
    assert not list((tmp_path / "cache").rglob("model.onnx*"))
    for runtime in ("auto", "llamacpp"):
        plans = plan_engine(Source(str(base_model), quiet), LoadOptions(runtime=runtime))
        with pytest.raises(UnsupportedModelError, match="no chat template"):
            open_engine(plans, needs_chat=True)


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
