"""A pair bundle from the command line: made, examined, answered from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_spec.cli.main import run
from fixtures import tiny_models

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def pair(edge_spec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of a tiny model; the first one drafts."""
    out = tmp_path_factory.mktemp("pairs") / "pair"
    whole = tiny_models.build("llama", num_hidden_layers=3, max_position_embeddings=512)
    model = tiny_models.write_hf(whole, out.with_name("tiny"))
    answers = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    config = {"chat_template": tiny_models.TEMPLATE + answers}
    tiny_models.write_json(model / "tokenizer_config.json", config)
    layers = ["--layers", "2", "--draft-layers", "1"]
    done = edge_spec("export", str(model), str(out), "--for", "linux", *layers, "--no-check")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{out}: ") and lines[0].endswith(", for linux")
    assert [line.split()[:2] for line in lines[1:]] == [
        ["target", "onnx"],
        ["target", "gguf"],
        ["draft", "onnx"],
        ["draft", "gguf"],
    ]
    return out


@pytest.mark.slow  # beside tests/integration/test_doctor.py
def test_doctor_examines_it_on_one_screen_and_fails_for_a_fault(edge_spec, pair: Path) -> None:
    done = edge_spec("doctor", str(pair))
    assert done.returncode == 0 and "0 faults, 1 warning," in done.stdout  # half is no small draft
    assert len(done.stdout.splitlines()) <= 44
    (pair / "tokenizer.json").rename(pair / "moved.json")
    done = edge_spec("doctor", str(pair), "--json")
    (pair / "moved.json").rename(pair / "tokenizer.json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (1, "faults")
    levels = [each["level"] for each in document["findings"] if each["group"] == "target"]
    assert levels == ["fault"]


def test_its_draft_is_opened_unless_it_is_turned_off(edge_spec, pair: Path) -> None:
    for options, is_open in (([], True), (["--draft", "none"], False)):
        done = edge_spec("generate", str(pair), "Hi", "--max-tokens", "4", *options)
        assert done.returncode == 0
        assert ("draft tiny-1-layers on llamacpp" in done.stderr) == is_open


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--compile"], "--compile is for a kind of device"),
        (["--for", "android", "--soc", "SM8650"], "--soc is of what is compiled"),
        (["--for", "vax"], "ios, macos, windows-npu, android, linux"),
        (["--for", "linux", "--format", "gguf"], "Leave --format out"),
        (["--for", "linux", "--format", "coreai"], "Leave --format out."),
        (["--for", "ios", "--format", "coreml"], "Leave --format out, or give --format coreai"),
        (["--for", "ios", "--format", "coreai", "--quant", "coreai=fp16"], "int8, int4, fp32"),
        (["--for", "linux", "--quant", "int4"], "FORMAT=NAME"),
        (["--for", "linux", "--compute", "ane"], "--compute is for one model"),
        (["--draft", "smollm2"], "Add --format all, or --for"),
        (["--format", "onnx", "--draft-layers", "1"], "Add --format all, or --for"),
        (["--for", "linux", "--draft", "smollm2"], "the draft would be smollm2 itself"),
        (["--format", "onnx,tflite"], "there is no exporter called 'tflite'. Installed: "),
    ],
)
def test_bad_usage_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], told: str
) -> None:
    """Without a process for each, as in test_cli.py."""
    assert run(["export", "smollm2", str(tmp_path / "out"), *arguments]) == 2
    out, errors = capfd.readouterr()
    (line,) = errors.splitlines()
    assert out == "" and told in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", [".", "target/onnx"])
def test_its_files_stay_as_they_were_written(
    capfd: pytest.CaptureFixture[str], pair: Path, part: str
) -> None:
    assert run(["tune-skip", str(pair / part)]) == 2
    out, errors = capfd.readouterr()
    assert out == "" and "is part of a pair bundle" in errors


def test_a_runtime_whose_format_it_lacks_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], pair: Path
) -> None:
    text = (pair / "pair.json").read_text()
    document = json.loads(text)
    del document["target"]["variants"][1]
    (pair / "pair.json").write_text(json.dumps(document))
    assert run(["generate", str(pair), "Hi", "--runtime", "llamacpp"]) == 2
    (pair / "pair.json").write_text(text)
    out, errors = capfd.readouterr()
    assert out == "" and errors.count("\n") == 1 and "its target as onnx, not as gguf" in errors
