"""Tiny models on disk, written once a session. See tests/fixtures/tiny_models.py."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers

from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.engine import speculation
from edge_spec.engine.engine import Engine
from edge_spec.errors import EdgeSpecError, ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.models.devices import Device, processor
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_export import PairPart, export_pair, named_formats
from edge_spec.models.source import Source
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.reference.model import ReferenceSession
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.policy import FixedPolicy
from fixtures import damage as damaged_files
from fixtures import (
    families,
    faulty_runtime,
    other_models,
    random_trees,
    tiny_models,
    trained_tokenizers,
)
from fixtures import side_by_side as compared_sessions
from fixtures.gate import Gate
from fixtures.server_requests import client_of

MODULES = {"llamacpp": "llama_cpp"}  # of runtimes that read GGUF files


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module that builds tiny models."""
    return tiny_models


@pytest.fixture(scope="session")
def others() -> ModuleType:
    """The module that builds tiny models of other architectures; needs torch."""
    return other_models


@pytest.fixture(scope="session")
def damage() -> ModuleType:
    """The module that damages GGUF files."""
    return damaged_files


@pytest.fixture(scope="session")
def trained() -> ModuleType:
    """The module that trains tokenizers."""
    return trained_tokenizers


@pytest.fixture(scope="session")
def hf(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """hf(variant, kind="F32", num_shards=1): a Hugging Face directory."""

    @cache
    def write(variant: str = "llama", kind: str = "F32", num_shards: int = 1) -> Path:
        directory = tmp_path_factory.mktemp("hf") / variant
        return Path(tiny.write_hf(tiny.build(variant), directory, kind, num_shards))

    return write


@pytest.fixture(scope="session")
def gguf(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """gguf(variant, kind="F32"): a GGUF file of the same weights."""

    @cache
    def write(variant: str = "llama", kind: str = "F32") -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"{variant}-{kind}.gguf"
        return Path(tiny.write_gguf(tiny.build(variant), path, kind))

    return write


@pytest.fixture(scope="session")
def checkpoint(hf: Callable[..., Path]) -> Callable[..., StoredCheckpoint]:
    return cache(lambda variant="llama": open_checkpoint(hf(variant)))


@pytest.fixture
def tokenized(tiny: ModuleType, tmp_path: Path) -> Callable[..., StoredCheckpoint]:
    """tokenized(tokenizer, spare=0, files={}, **config): a Hugging Face directory with it, open."""

    def make(
        tokenizer: tokenizers.Tokenizer | dict[str, Any],
        spare: int = 0,
        files: dict[str, Any] | None = None,
        **config: Any,
    ) -> StoredCheckpoint:
        described = tokenizer if isinstance(tokenizer, dict) else json.loads(tokenizer.to_str())
        ids = [token["id"] for token in described["added_tokens"]]
        vocabulary = described["model"]["vocab"]
        size = 1 + max(ids + (list(vocabulary.values()) if isinstance(vocabulary, dict) else []))
        model = tiny.build(vocab_size=size + spare, **config)
        path = tiny.write_hf(model, tmp_path / "model")
        tiny.write_json(path / "tokenizer.json", described)
        for name, content in (files or {}).items():
            tiny.write_json(path / name, content)
        return open_checkpoint(path)

    return make


@pytest.fixture(scope="session")
def exported(
    checkpoint: Callable[..., StoredCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bundle]:
    """exported(variant, quantization): a bundle that its own check has passed."""

    @cache
    def export(variant: str = "llama", quantization: str = "fp32") -> Bundle:
        out = tmp_path_factory.mktemp("bundle") / variant
        options = ExportOptions(quantization, check=True)
        OnnxExporter().export(checkpoint(variant), out, options, lambda what, fraction: None)
        return open_bundle(out)

    return export


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StoredCheckpoint]:
    """family(name): a tiny model of fixtures/families.py, from its Hugging Face directory."""

    @cache
    def opened(name: str) -> StoredCheckpoint:
        directory = tmp_path_factory.mktemp("families") / name
        return open_checkpoint(families.write_hf(name, directory))

    return opened


@pytest.fixture(scope="session")
def family_bundle(
    family: Callable[[str], StoredCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bundle]:
    """family_bundle(name, quantization="fp32"): as an ONNX bundle, uncompared."""

    @cache
    def export(name: str, quantization: str = "fp32") -> Bundle:
        out = tmp_path_factory.mktemp("bundle") / name
        options = ExportOptions(quantization, check=False)
        OnnxExporter().export(family(name), out, options, lambda what, done: None)
        return open_bundle(out)

    return export


@pytest.fixture(scope="session")
def packaged(
    checkpoint: Callable[..., StoredCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bundle]:
    """packaged(variant, compute="gpu"): a float16 Core ML bundle of 100 tokens of context."""

    @cache
    def export(variant: str = "llama", compute: str = "gpu") -> Bundle:
        out = tmp_path_factory.mktemp("package") / variant
        options = ExportOptions("fp16", compute=compute, context_length=100, check=False)
        exporter = runtimes.load_exporter("coreml")
        exporter.export(checkpoint(variant), out, options, lambda what, fraction: None)
        return open_bundle(out)

    return export


@pytest.fixture(scope="session")
def exported_pair(hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair bundle: a model of two layers as ONNX and GGUF, and its first layer, that drafts."""
    out = tmp_path_factory.mktemp("pairs") / "pair"
    target = PairPart(Source(str(hf()), lambda what, fraction: None))
    draft, formats = replace(target, num_layers=1), named_formats(["onnx", "gguf"])
    export_pair(target, draft, formats, out, lambda what, fraction: None)
    return out


@pytest.fixture
def pair(exported_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, beside an empty cache."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(exported_pair, tmp_path / "pair"))


@pytest.fixture(params=["llamacpp"])
def llama(request: pytest.FixtureRequest) -> str:
    """The name of a runtime that reads GGUF files; the test is run with each installed one."""
    pytest.importorskip(MODULES[request.param])
    return str(request.param)


@pytest.fixture(scope="session")
def open_llama() -> Callable[..., LlamaCppModel]:
    """open_llama(runtime, path, **options): on one thread, which waits for no other."""

    def open_model(runtime: str, path: Path, **options: Any) -> LlamaCppModel:
        options = {"threads": 1} | options
        model = runtimes.load_runtime(runtime).open(
            runtimes.open_model_info(path), RuntimeOptions(**options)
        )
        assert isinstance(model, LlamaCppModel)
        return model

    return open_model


@pytest.fixture
def llama_ids() -> Iterator[Callable[[Path, str], list[int]]]:
    """llama_ids(path, text): what llama.cpp itself makes of a text, its special tokens parsed."""
    api: Any = pytest.importorskip("llama_cpp")
    runtimes.load_runtime("llamacpp")
    opened: dict[Path, Any] = {}

    def ids(path: Path, text: str) -> list[int]:
        if path not in opened:
            params = api.llama_model_default_params()
            params.vocab_only = True
            opened[path] = api.llama_model_load_from_file(str(path).encode(), params)
            assert opened[path]
        raw = text.encode()
        found = (api.llama_token * (len(raw) + 16))()
        vocabulary = api.llama_model_get_vocab(opened[path])
        count = api.llama_tokenize(vocabulary, raw, len(raw), found, len(found), False, True)
        assert count >= 0
        return list(found[:count])

    yield ids
    for model in opened.values():
        api.llama_model_free(model)


@pytest.fixture(scope="session")
def side_by_side() -> ModuleType:
    """The module that compares a session with the reference's."""
    return compared_sessions


@pytest.fixture(params=["llamacpp", "llamacpp-flash"])
def setup(request: pytest.FixtureRequest, side_by_side: ModuleType) -> Any:
    """A runtime that reads GGUF files, its options, and how exact it is with them."""
    chosen = side_by_side.SETUPS[request.param]
    pytest.importorskip(MODULES[chosen.runtime])
    return chosen


@pytest.fixture(scope="session")
def make_both(
    tiny: ModuleType,
    side_by_side: ModuleType,
    open_llama: Callable[..., LlamaCppModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """make_both(setup, path, **options): a session of the runtime and one of the reference."""
    model = tiny.build("qwen3", max_position_embeddings=1024)
    long = tiny.write_gguf(model, tmp_path_factory.mktemp("long") / "long.gguf")

    def make(setup: Any, path: Path = long, **options: Any) -> Any:
        model = open_llama(setup.runtime, path, **setup.options, **options)
        reference = ReferenceModel(runtimes.open_checkpoint(path), model.config.context_length)
        sessions = (model.open_session(), reference.open_session())
        return side_by_side.Both(sessions, setup.tolerance)

    return make


@pytest.fixture
def both(setup: Any, make_both: Callable[..., Any]) -> Any:
    return make_both(setup)


@pytest.fixture
def session(both: Any) -> Any:
    return both.sessions[0]


@pytest.fixture(scope="session")
def tokens() -> Callable[..., list[int]]:
    """tokens(count, seed=0): token ids of the tiny vocabulary, the same in every run."""
    return lambda count, seed=0: np.random.RandomState(seed).randint(0, 262, count).tolist()


@pytest.fixture(scope="session")
def scores() -> Callable[[Session, list[int]], np.ndarray]:
    """scores(session, tokens): logits [tokens, vocab] of the tokens as one chain, uncommitted."""

    def score(session: Session, chain: list[int]) -> np.ndarray:
        return session.forward(TokenTree.chain(chain[0], chain[1:])).logits.copy()

    return score


@pytest.fixture(scope="session")
def random_tree(tokens: Callable[..., list[int]]) -> Callable[..., TokenTree]:
    """random_tree(rows, seed): branches at random, so that paths are not contiguous."""

    return lambda rows, seed=0: random_trees.random_tree(
        np.random.RandomState(seed), tokens(rows, seed)
    )


@pytest.fixture(scope="session")
def read() -> Callable[[Path], None]:
    """read(path): everything of a model that an export reads."""

    def read_all(path: Path) -> None:
        checkpoint = open_checkpoint(path)
        with np.errstate(all="ignore"):  # damaged weights may be infinite
            for name in checkpoint.names():
                checkpoint.float32(name)
        checkpoint.tokenizer_json()

    return read_all


@pytest.fixture(scope="session")
def refusal(read: Callable[[Path], None]) -> Callable[..., EdgeSpecError]:
    """refusal(path, file): the error of a bad model, one line that names `file`, with a remedy."""

    def refused(path: Path, file: str = "") -> EdgeSpecError:
        with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
            read(path)
        text = str(caught.value)
        assert (file or path.name) in text
        assert caught.value.remedy
        assert text.endswith(caught.value.remedy)
        assert "\n" not in text
        assert len(text) < 500
        return caught.value

    return refused


@pytest.fixture(scope="session")
def served_once(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model whose chat template knows tools, on the numpy runtime."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    tiny.write_hf(tiny.build("llama", max_position_embeddings=1024), path)
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        + tiny.TEMPLATE
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tiny.write_json(path / "tokenizer_config.json", {"chat_template": template})
    options = LoadOptions(runtime="reference", context_length=1024)
    with load_engine(str(path), options, lambda what, fraction: None) as engine:
        yield engine


@pytest.fixture
def served(served_once: Engine) -> Iterator[Engine]:
    with served_once.fork() as engine:
        yield engine


@pytest.fixture(scope="module")
def client(served_once: Engine) -> Iterator[httpx.Client]:
    """A client of a server of `served_once`, with one slot."""
    with served_once.fork() as engine, client_of(engine) as opened:
        yield opened


@pytest.fixture
def serve(served: Engine) -> Iterator[Callable[..., httpx.Client]]:
    """serve(**options): a client of a server of `served`, on two slots."""
    with ExitStack() as opened:

        def start(**options: Any) -> httpx.Client:
            options = {"port": 0, "parallel": 2, "grace_s": 0.0} | options
            running = opened.enter_context(RunningServer(served, ServerOptions(**options)))
            return opened.enter_context(httpx.Client(base_url=running.url, timeout=30))

        yield start


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, serve: Any) -> Iterator[Any]:
    """Before each round of an answer on the numpy runtime. What passes cost is not measured when a
    model is opened: that would wait at the gate, where nothing of it was kept before."""
    costs = RowCosts({1: 1e-3, 2: 1.1e-3, 8: 2e-3})
    monkeypatch.setattr("edge_spec.loader.open.begun_costs", lambda *measured: costs)
    held, forward = Gate(), ReferenceSession.forward

    def gated(session: ReferenceSession, tree: TokenTree) -> Any:
        held.pass_through()
        return forward(session, tree)

    monkeypatch.setattr(ReferenceSession, "forward", gated)
    yield held
    held.end()


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """1 GiB more than now: believing a count in a damaged file ends in MemoryError."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="session")
def faulty_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is tried on devices with a fault."""
    tiny = tiny_models.build(max_position_embeddings=512)
    return str(tiny_models.write_gguf(tiny, tmp_path_factory.mktemp("faulty") / "tiny.gguf"))


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime of tests/fixtures/faulty_runtime.py, here and in processes that are started; and
    a cache of its own."""
    packages = tmp_path / "packages"
    packages.mkdir()
    faulty_runtime.install(packages)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(map(str, (packages, Path(__file__).parents[1])))
    )
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor, on two runtimes: to ask all of them takes a process for each."""

    def listed(runtime: str, *given: object) -> list[Device]:
        return [processor(runtime)] if runtime in ("llamacpp", "ort") else []

    monkeypatch.setattr("edge_spec.models.devices._listed", listed)


@pytest.fixture
def fixed_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts however slow drafts and passes are here."""

    def fixed(
        costs: object,
        draft_token_s: object,
        free: object,
        max_draft_tokens: int,
        branches: bool,
        probes: bool,
        named: object,
    ) -> FixedPolicy:
        return FixedPolicy(max_draft_tokens, 0.0, branches, probes)

    monkeypatch.setattr(speculation, "AdaptivePolicy", fixed)
