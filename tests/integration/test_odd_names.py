"""File names that are not UTF-8 work in every command, or end in one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

import edge_spec
from edge_spec.cli.main import run
from edge_spec.cli.signals import prepare_streams
from edge_spec.models.source import Source, served_names
from fixtures.server_requests import CHAT, client_of, post

SHORT = ("--max-tokens", "4")
PROMPTS = {"p\udce9.jsonl": '{"id": "a", "category": "x", "prompt": "Hi"}\n', "p\udce9.txt": "Hi\n"}


@pytest.fixture(autouse=True)
def odd(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: each kind of model and of prompts under such a name."""
    try:
        (tmp_path / "d\udce9").mkdir()
    except OSError:
        pytest.skip("the file system has no such names")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    model = tiny.build("llama", max_position_embeddings=512)
    tiny.write_gguf(model, tmp_path / "plain.gguf", "F16")
    (tmp_path / "caf\udce9.gguf").write_bytes((tmp_path / "plain.gguf").read_bytes())
    (tmp_path / "d\udce9" / "m.gguf").write_bytes((tmp_path / "plain.gguf").read_bytes())
    tiny.write_hf(model, tmp_path / "hf\udce9")
    for name, text in PROMPTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def ends(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str, str]:
    """Its status, output and errors; an error that was not raised on purpose fails the test."""
    prepare_streams()  # as a process begins
    status = run(list(command))
    out, err = capsys.readouterr()
    assert not (status and "Traceback" in err)
    return status, out, err


@pytest.mark.parametrize("model", ["caf\udce9.gguf", "d\udce9/m.gguf", "hf\udce9"])
@pytest.mark.parametrize("runtime", ["llamacpp", "ort", "reference"])
def test_a_model_answers_as_under_a_plain_name(
    capsys: pytest.CaptureFixture[str], model: str, runtime: str
) -> None:
    texts = []
    for name in ("plain.gguf" if "gguf" in model else "hf", model):
        if name == "hf":
            Path("hf").symlink_to("hf\udce9")
        asked = ("generate", name, "Hi there", "--runtime", runtime, "--json", *SHORT)
        status, out, _ = ends(capsys, *asked)
        assert status == 0
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "plain.gguf", "Hi", "--draft", "caf\udce9.gguf", *SHORT),
        ("generate", "plain.gguf", "Hi", "--corpus", "p\udce9.txt", *SHORT),
        ("generate", "caf\udce9.gguf", "Hi", "--remember", *SHORT),
        ("doctor", "caf\udce9.gguf"),
        ("doctor", "hf\udce9", "--json"),
        pytest.param(("plan", "caf\udce9.gguf"), marks=pytest.mark.slow),
        ("bench", "caf\udce9.gguf", "--prompts", "p\udce9.jsonl", *SHORT),
        pytest.param(
            ("verify", "caf\udce9.gguf", "--prompts", "p\udce9.txt", *SHORT), marks=pytest.mark.slow
        ),
        ("export", "caf\udce9.gguf", "out\udce9.gguf", "--format", "gguf", "--quant", "F16"),
        ("export", "hf\udce9", "out\udce9.gguf", "--format", "gguf"),
        ("export", "hf\udce9", "bundle", "--format", "onnx"),
        ("export", "caf\udce9.gguf", "pair", "--draft", "hf\udce9", "--format", "gguf,onnx"),
    ],
    ids=lambda command: " ".join(command[:2]).encode("ascii", "replace").decode(),
)
@pytest.mark.usefixtures("two_devices")
def test_a_command_works(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    status, _, err = ends(capsys, *command)
    assert status == (3 if command[0] == "verify" else 0), err  # of so few tokens it shows nothing


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("export", "hf\udce9", "out\udce9", "--format", "onnx"), "no path in UTF-8"),
        (
            ("export", "hf\udce9", "out\udce9", "--draft", "plain.gguf", "--format", "all"),
            "no path in UTF-8",
        ),
        (("plan", "plain.gguf", "--draft", "caf\udce9.gguf"), "as the draft of a plan needs"),
        (("pull", "hf:org/caf\udce9"), "names no model of the hub"),
        (("generate", "missing\udce9.gguf", "Hi"), "no such file or directory: missing\ufffd.gguf"),
        (("generate", "plain.gguf", "Hi", "--schema", "p\udce9.txt"), "cannot read the schema"),
        (("bench", "plain.gguf", "--prompts", "none\udce9.txt"), "cannot read prompts"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_refusal_is_one_line(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], line: str
) -> None:
    status, _, err = ends(capsys, *command)
    assert status in (1, 2) and line in err and err.count("\n") == 1


def test_a_bundle_says_in_one_line_that_it_cannot_be_opened_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ends(capsys, "export", "hf\udce9", "bundle", "--format", "onnx")[0] == 0
    Path("bundle").rename("bundle\udce9")
    monkeypatch.setenv("EDGE_SPEC_CACHE", "cache\udce9")
    for asked in (("bundle\udce9",), ("plain.gguf", "--runtime", "ort")):
        status, _, err = ends(capsys, "generate", asked[0], "Hi", *asked[1:], *SHORT)
        assert status == 2 and "no path in UTF-8" in err.splitlines()[-1]


def test_a_snapshot_and_a_served_name() -> None:
    with edge_spec.load("caf\udce9.gguf", runtime="llamacpp") as engine:
        engine.generate("Hi there", max_tokens=4)
        engine.snapshot(Path("s\udce9.snap"))
        engine.restore(Path("s\udce9.snap"))
        with client_of(engine) as client:
            listed = client.get("/v1/models").json()["data"]
            assert post(client, CHAT).json()["model"] == "caf\ufffd"
    assert [model["id"] for model in listed] == ["caf\ufffd"]
    assert served_names(["caf\udce9.gguf"], []) == [("caf\ufffd",)]


def test_two_names_stay_two_models(odd: Path) -> None:
    (odd / "caf\udce8.gguf").write_bytes((odd / "caf\udce9.gguf").read_bytes())
    first, second = (
        Source(str(odd / name), lambda *_: None) for name in ("caf\udce8.gguf", "caf\udce9.gguf")
    )
    assert first.name == second.name and first.identity != second.identity
    assert first.path.samefile(odd / "caf\udce8.gguf")
