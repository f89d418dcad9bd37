"""`hf:` models, pulled from a server on this machine that answers as the hub does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, file_download

import edge_spec
from edge_spec.cli.main import run
from edge_spec.errors import DownloadError, UnsupportedModelError, UsageError
from edge_spec.models import draft_choice
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.hub import HubReference
from edge_spec.models.hub_download import find_cached, pull
from edge_spec.models.source import Source
from fixtures import fake_hub, heads
from fixtures.silence import quiet

MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"
PROMPT = "the inn and the"


def fetch(model: str) -> Any:
    return pull(HubReference.parse(model), quiet)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The server; huggingface_hub and edge-spec have empty caches and no token."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub.running() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # by version, where huggingface_hub reads it
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        yield running
    forget = getattr(huggingface_hub, "close_session", None)
    if forget is None:  # before huggingface_hub 1.0
        from huggingface_hub.utils import reset_sessions as forget
    forget()


@pytest.fixture(scope="module")
def models(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory "small", "large" with the same tokens, and "one.Q8_0.gguf"."""
    path = tmp_path_factory.mktemp("models")
    tiny.write_hf(tiny.build(), path / "small")
    tiny.write_hf(tiny.build(seed=1, num_hidden_layers=6), path / "large", num_shards=2)
    tiny.write_gguf(tiny.build(), path / "one.Q8_0.gguf", "Q8_0")
    return path


def in_process(hub: Any, tmp_path: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "EDGE_SPEC_CACHE": str(tmp_path / "own"),
    }
    return [sys.executable, "-c", MAIN, *arguments], environment


# What is fetched


def test_a_directory_comes_with_all_that_describes_it_and_nothing_else(
    hub: Any, models: Path
) -> None:
    repository = hub.add("org/large", models / "large")
    repository.files |= {"pytorch_model.bin": b"pickle", "model.py": b"code", "README.md": b"#"}
    model = fetch("hf:org/large")
    assert {path.name for path in model.path.iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    }
    for name, path in model.files.items():
        assert path.read_bytes() == repository.files[name]
    assert model.commit == repository.commit and model.name == "large"


def test_what_is_here_is_not_fetched_again(hub: Any, models: Path) -> None:
    """Whoever fetched it: huggingface_hub and this program share files."""
    repository = hub.add("org/small", models / "small")
    api = huggingface_hub.HfApi(endpoint=hub.endpoint)
    path = Path(api.hf_hub_download("org/small", "model.safetensors")).parent
    hub.requests.clear()
    first = fetch("hf:org/small")
    assert first.path == path and not hub.contents()
    hub.requests.clear()
    assert fetch("hf:org/small") == first
    assert [request.path for request in hub.requests] == ["/api/models/org/small/revision/main"]
    hub.requests.clear()
    assert find_cached(HubReference.parse("hf:org/small")) == first
    found = huggingface_hub.try_to_load_from_cache("org/small", "model.safetensors")
    assert found == str(first.path / "model.safetensors") and not hub.requests
    assert repository.commit == first.commit


def test_nothing_is_asked_but_the_list_and_the_files(
    hub: Any, models: Path, tmp_path: Path
) -> None:
    hub.add("org/one", models / "one.Q8_0.gguf")
    commit = hub.repositories["org/one"].commit
    command, environment = in_process(hub, tmp_path, "pull", "hf:org/one")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(done.stdout.strip()).read_bytes() == (models / "one.Q8_0.gguf").read_bytes()
    assert [request.path for request in hub.requests] == [
        "/api/models/org/one/revision/main",
        f"/org/one/resolve/{commit}/one.Q8_0.gguf",
        hub.contents()[0].path,
    ]
    assert all(request.agent.startswith("edge-spec/") for request in hub.requests)
    assert not any(
        "torch" in request.agent or "agent/" in request.agent for request in hub.requests
    )


# Interrupts and damage


def test_a_cut_connection_is_resumed_where_it_was_cut(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    content = np.random.RandomState(0).bytes(200_000)
    hub.add("org/one", {"one.gguf": content})
    hub.cut_at = 150_000
    assert fetch("hf:org/one").path.read_bytes() == content
    ranges = [request.range for request in hub.contents()]
    assert ranges == [None, "bytes=150000-"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_an_interrupted_pull_goes_on_with_what_arrived(hub: Any, tmp_path: Path) -> None:
    content = np.random.RandomState(0).bytes(12_000_000)  # more than huggingface_hub reads at once
    repository = hub.add("org/one", {"one.gguf": content})
    hub.stall_at = 11_000_000
    command, environment = in_process(hub, tmp_path, "pull", "hf:org/one")
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert hub.stalled.wait(60)
        partial = tmp_path / "hub/models--org--one/blobs"
        (file,) = partial.iterdir()
        while not file.stat().st_size:  # sent is not yet received
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and not out and b"Traceback" not in err
    hub.go_on.set()
    arrived = file.stat().st_size
    assert 0 < arrived < len(content)
    model = fetch("hf:org/one")
    assert model.path.read_bytes() == content and model.commit == repository.commit
    assert hub.contents()[-1].range == f"bytes={arrived}-"
    assert not file.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_with_another_hash_is_removed_and_named(hub: Any, models: Path, name: str) -> None:
    """config.json is a small file, which Git hashes, and comes before the weights."""
    hub.add("org/small", models / "small")
    hub.wrong.add((models / "small" / name).read_bytes())
    with pytest.raises(DownloadError, match=rf"{name} of hf:org/small .*hash differs"):
        fetch("hf:org/small")
    assert find_cached(HubReference.parse("hf:org/small")) is None
    assert bool(hub.contents()) == (name == "model.safetensors")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    hub.wrong.clear()
    fetch("hf:org/small")


def test_leftovers_that_are_not_the_file_do_not_stay(hub: Any, models: Path) -> None:
    content = (models / "one.Q8_0.gguf").read_bytes()
    hub.add("org/one", models / "one.Q8_0.gguf")
    blobs = Path(constants.HF_HUB_CACHE) / "models--org--one/blobs"
    blobs.mkdir(parents=True)
    (entry,) = hub.repositories["org/one"].listing()
    partial = blobs / f"{entry['lfs']['sha256']}.incomplete"
    partial.write_bytes(b"x" * 100)
    with pytest.raises(DownloadError, match="hash differs"):
        fetch("hf:org/one")
    assert fetch("hf:org/one").path.read_bytes() == content
    shutil.rmtree(blobs.parent)
    blobs.mkdir(parents=True)
    partial.write_bytes(content + b"more than there is")
    assert fetch("hf:org/one").path.read_bytes() == content


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("more", [-10, 10])
def test_a_file_of_another_size_than_stated_is_not_taken(
    hub: Any, models: Path, name: str, more: int
) -> None:
    repository = hub.add("org/small", models / "small")
    repository.sizes[name] = len(repository.files[name]) + more
    with pytest.raises(DownloadError, match=rf"{name} of hf:org/small arrived with another size"):
        fetch("hf:org/small")
    left = Path(constants.HF_HUB_CACHE).rglob("*.incomplete")
    assert all(path.stat().st_size <= repository.sizes[name] for path in left)
    assert find_cached(HubReference.parse("hf:org/small")) is None


def test_too_little_space_is_told_before_anything_is_fetched(
    hub: Any, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/one", models / "one.Q8_0.gguf")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"are to be fetched.* 0 MB free.*HF_HUB_CACHE"):
        fetch("hf:org/one")
    assert not hub.contents()


# Refusals


def test_a_gated_model_needs_a_token_which_stays_with_the_hub(
    hub: Any, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/one", models / "one.Q8_0.gguf", gated=True)
    with pytest.raises(DownloadError, match=r"is gated.*/org/one.*HF_TOKEN"):
        fetch("hf:org/one")
    monkeypatch.setenv("HF_TOKEN", "insider")
    fetch("hf:org/one")
    assert hub.requests[-2].token == "insider"
    assert hub.contents() and all(request.token is None for request in hub.contents())


def listed_as(name: str) -> Callable[[Any], object]:
    return lambda hub: hub.repositories["org/one"].names.update({"one.Q8_0.gguf": name})


def without_tokenizer(hub: Any) -> None:
    del hub.repositories["org/small"].files["tokenizer.json"]


def answered(body: bytes) -> Callable[[Any], object]:
    return lambda hub: setattr(hub, "listings_instead", body)


def nothing(hub: Any) -> None: ...


NOT_LISTED = r"no model org/{} on http.*, or it is private.*HF_TOKEN"
REFUSALS: list[tuple[str, Callable[[Any], object], type[Exception], str]] = [
    ("hf:org/nonesuch", nothing, DownloadError, NOT_LISTED.format("nonesuch")),
    ("hf:org/secret", nothing, DownloadError, NOT_LISTED.format("secret")),
    ("hf:org/one@v9", nothing, DownloadError, r"hf:org/one has no revision 'v9'.*/org/one"),
    ("hf:org/one:two.gguf", nothing, UsageError, r"no file two\.gguf\. It has: one\.Q8_0\.gguf"),
    ("hf:org/old", nothing, UnsupportedModelError, "pickle, which can run code"),
    ("hf:org/head", nothing, UnsupportedModelError, "as a pickle"),
    ("hf:org/small", without_tokenizer, UnsupportedModelError, r"has no tokenizer\.json"),
    *(
        ("hf:org/one", listed_as(name), DownloadError, "outside of the repository")
        for name in ("../../evil.gguf", "/evil.gguf", "a\\evil.gguf", "C:evil.gguf")
    ),
    *(
        ("hf:org/one", answered(body), DownloadError, "no list of files")
        for body in (b"<html>", b"[]", b"{}", b'{"id": "org/one", "sha": "../../x"}')
    ),
]


@pytest.mark.parametrize(("model", "prepare", "kind", "told"), REFUSALS)
def test_what_cannot_be_had_is_refused_before_its_weights_are_fetched(
    hub: Any,
    models: Path,
    tmp_path: Path,
    model: str,
    prepare: Callable[[Any], object],
    kind: type[Exception],
    told: str,
) -> None:
    head = heads.draw(7, 265, "safeailab").write(tmp_path / "head")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    hub.add("org/head", head)
    hub.add("org/one", models / "one.Q8_0.gguf")
    hub.add("org/small", models / "small")
    hub.add("org/secret", models / "one.Q8_0.gguf", private=True)
    hub.add("org/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    prepare(hub)
    with pytest.raises(kind, match=told):
        fetch(model)
    assert not hub.contents() and not list(Path(constants.HF_HUB_CACHE).rglob("*.gguf"))


# Without the network


def test_offline_a_model_that_is_here_opens(
    hub: Any, models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/small", models / "small")
    first = fetch("hf:org/small")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Source("hf:org/small", quiet).path == first.path
    assert not caplog.records
    assert fetch("hf:org/small") == first
    assert "as the cache has it" in caplog.text


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("HF_HUB_OFFLINE", True, "not wholly in the cache, and HF_HUB_OFFLINE is set"),
        ("ENDPOINT", "http://127.0.0.1:1", r"http://127\.0\.0\.1:1 cannot be reached"),
    ],
)
def test_without_a_network_a_model_that_is_not_here_is_an_error_that_says_so(
    hub: Any, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, told: str
) -> None:
    monkeypatch.setattr(constants, setting, value)
    with pytest.raises(DownloadError, match=told):
        Source("hf:org/small", quiet).path  # noqa: B018
    assert not hub.requests


# As MODEL and as --draft


def test_models_of_the_hub_answer_as_those_on_disk_and_as_drafts_change_no_text(
    hub: Any, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/small", models / "small")
    common = [PROMPT, "--raw", "--max-tokens", "8", "--runtime", "reference"]
    drafting = ["--draft", "hf:org/small", "--drafter", "draft-model"]
    drafting += ["--draft-runtime", "reference"]

    def answered(model: Path | str, *options: str) -> tuple[str, str]:
        assert run(["generate", str(model), *common, *options]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err

    expected, _ = answered(models / "small")
    text, told = answered("hf:org/small")
    assert text == expected and "Downloading hf:org/small, 0 MB" in told
    plain, _ = answered(models / "large", "--drafter", "none")
    assert answered(models / "large", *drafting)[0] == plain
    assert len(hub.contents()) == 1


def test_draft_auto_finds_the_smaller_model_with_the_same_tokens(
    hub: Any, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/small", models / "small")
    fetch("hf:org/small")
    large = Source(str(models / "large"), quiet)
    auto = AskedOptions(draft="auto")
    assert chosen_drafts(large, auto) == ("hf:org/small",)
    small = Source("hf:org/small", quiet)
    assert chosen_drafts(small, auto) == ()
    assert "there is no draft for small here" in caplog.text
    with pytest.raises(UsageError, match="chooses the only draft"):
        chosen_drafts(large, AskedOptions(draft=["auto", "hf:org/small"]))
    with edge_spec.load(
        str(models / "large"), runtime="reference", draft="auto", draft_runtime="reference"
    ) as llm:
        assert len(llm.parts.drafts) == 1
    (small.path / "tokenizer.json").unlink()
    text = (models / "small" / "tokenizer.json").read_text("utf-8")
    (small.path / "tokenizer.json").write_text(text.replace("im_end", "other"), "utf-8")
    assert draft_choice.suggest_draft(large) is None  # it has other tokens now


# The command


def test_pull_prints_the_path_and_as_json_what_it_is(
    hub: Any, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub.add("org/small", models / "small")
    assert run(["pull", "hf:org/small"]) == 0
    path = capsys.readouterr().out.strip()
    assert Path(path) == find_cached(HubReference.parse("hf:org/small")).path  # type: ignore[union-attr]
    assert run(["pull", "hf:org/small", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    files = document.pop("files")
    assert document == {
        "model": "hf:org/small",
        "path": path,
        "revision": repository.commit,
        "num_bytes": sum(file["num_bytes"] for file in files),
        "draft": None,
    }
    for file in files:
        content = repository.files[file["name"]]
        assert file["num_bytes"] == len(content)
        assert file["sha256"] == fake_hub.sha256(content)


def test_pull_draft_auto_fetches_the_small_one_of_the_family(
    hub: Any, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("Qwen/Qwen2.5-7B-Instruct", models / "large")
    hub.add("Qwen/Qwen2.5-0.5B-Instruct", models / "small")
    assert run(["pull", "hf:Qwen/Qwen2.5-7B-Instruct", "--draft", "auto"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2 and "Qwen2.5-0.5B" in shown.out.splitlines()[1]
    assert "note" not in shown.err
    found = chosen_drafts(Source("hf:Qwen/Qwen2.5-7B-Instruct", quiet), AskedOptions(draft="auto"))
    assert found == ("hf:Qwen/Qwen2.5-0.5B-Instruct",)


# Trained heads


@pytest.fixture
def deep(tiny: ModuleType, tmp_path: Path) -> Path:
    """A model of layers enough for a head."""
    return Path(tiny.write_hf(tiny.build(num_hidden_layers=7), tmp_path / "deep"))


@pytest.mark.usefixtures("fixed_policy", "two_devices")
def test_a_head_of_the_hub_drafts_for_its_target(
    hub: Any, deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/large", deep)
    hub.add("org/head", heads.draw(7, 265, "speculators").write(tmp_path / "head"))
    with edge_spec.load("hf:org/large", runtime="reference", draft="hf:org/head") as engine:
        assert engine.generate(PROMPT, max_tokens=20).stats.drafters["eagle"].draft_n > 0
    assert run(["doctor", "hf:org/large", "--draft", "hf:org/head", "--json"]) in (0, 1)
    assert "EAGLE-3 from features 2, 3" in capsys.readouterr().out
