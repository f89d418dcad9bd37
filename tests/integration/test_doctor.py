"""`edge-spec doctor` finds what is wrong with a bundle and its chat template, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.diagnostics.doctor.report import Finding, Severity
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import Bundle, PairManifest, list_files, read_listing
from edge_spec.models.devices import Device
from fixtures.manifests import rewrite
from fixtures.silence import quiet

Exported = Callable[..., Bundle]
# The template of the tiny models does not ask for an answer.
NO_QUESTION = "a prompt ends without '<|im_start|>assistant'"
EMPTY: Mapping[str, str] = MappingProxyType({})
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASKING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
pytestmark = pytest.mark.usefixtures("cache")


def examined(path: Path, runtime: str = "auto", *, hashes: bool = False) -> list[Finding]:
    """What is found of the models."""
    devices = [Device("ort", "cpu", "cpu", "the processor")]
    report = diagnose(
        str(path), AskedOptions(runtime=runtime), quiet, hashes=hashes, devices=lambda: devices
    )
    return [each for each in report.findings if each.group in ("target", "draft", "run")]


def faults(path: Path, runtime: str = "auto") -> list[Finding]:
    return [
        finding
        for finding in examined(path, runtime)
        if finding.level in (Severity.WARNING, Severity.FAULT) and NO_QUESTION not in finding.found
    ]


def the_fault(path: Path, runtime: str = "auto") -> Finding:
    (found,) = faults(path, runtime)
    assert found.remedy and "\n" not in found.found
    return found


def relist(pair: Path, role: str, format: str, **changes: Any) -> None:
    """Makes pair.json agree with a variant that a test has changed, so that no hash shows it."""
    document = json.loads((pair / "pair.json").read_text())
    for variant in document[role]["variants"]:
        if variant["format"] == format:
            files = list_files(pair, pair / variant["path"])
            variant["files"] = {name: entry.model_dump() for name, entry in files.items()}
            variant |= changes
    (pair / "pair.json").write_text(json.dumps(document))
    read_listing(pair, PairManifest)


def test_a_pair_as_it_was_written_has_no_fault(pair: Path) -> None:
    pytest.importorskip("llama_cpp")
    assert faults(pair) == []
    found = examined(pair)
    checks = {finding.check for finding in found}
    assert checks == {
        *("architecture", "chat template", "end of text", "files"),
        *("engine", "tokenizer", "turns"),
    }
    assert len(found) <= 12 and all(len(finding.found) < 120 for finding in found)


def test_every_end_is_listed_with_what_states_it(
    exported: Exported, gguf: Callable[..., Path], hf: Callable[..., Path]
) -> None:
    for path, source in (
        (exported().path, "manifest.json"),
        (gguf(), "eos_token_id"),
        (hf(), "config.json"),
    ):
        found = examined(path)
        assert [each.found for each in found if each.check == "end of text"] == [
            f"tokens 264 '<|im_end|>' by {source}; 262 '<|endoftext|>' by its name",
        ]


def test_what_is_no_model_is_a_fault(gguf: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no GGUF")
    assert "x.gguf" in the_fault(tmp_path / "x.gguf").found
    whole = gguf().read_bytes()
    (tmp_path / "y.gguf").write_bytes(whole[:-100])
    assert "y.gguf" in the_fault(tmp_path / "y.gguf").found
    (tmp_path / "empty").mkdir()
    assert "config.json" in the_fault(tmp_path / "empty").found


def test_large_files_are_not_hashed_unless_that_is_asked_for(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pair / "target/gguf/model.gguf"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr("edge_spec.diagnostics.doctor.model.HASHED_BYTES", 1000)
    (found,) = (each for each in examined(pair) if each.check == "files")
    assert "not hashed" in found.found and found.level is Severity.NOTE
    found = [each for each in examined(pair, hashes=True) if each.check == "files"]
    assert "sha256" in found[0].found and found[0].level is Severity.FAULT
    file.write_bytes(content[:-1])
    assert "bytes, expected" in the_fault(pair).found  # sizes are always compared


def test_one_model_of_a_pair_can_be_named_alone(pair: Path) -> None:
    assert faults(pair / "draft") == []
    (found,) = (each for each in examined(pair / "draft") if each.check == "architecture")
    assert "1 layers" in found.found


@pytest.mark.parametrize(
    "name", ["target/gguf/model.gguf", "draft/onnx/model.onnx", "tokenizer.json"]
)
def test_a_damaged_or_missing_file_is_named(pair: Path, name: str) -> None:
    content = bytearray((pair / name).read_bytes())
    content[len(content) // 2] ^= 1
    (pair / name).write_bytes(content)
    assert name in the_fault(pair).found and "sha256" in the_fault(pair).found
    (pair / name).unlink()
    assert f"{name} is missing" in the_fault(pair).found


def test_a_foreign_file_is_a_warning(pair: Path, exported: Exported, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exported().path, tmp_path / "bundle"))
    for path in (pair, bundle):
        (path / "virus.exe").touch()
        found = the_fault(path)
        assert (found.level, found.check) == (Severity.WARNING, "files")
        assert "virus.exe" in found.found


@pytest.mark.parametrize("name", ["pair.json", "target/onnx/manifest.json"])
def test_a_manifest_of_another_version_is_a_fault(pair: Path, name: str) -> None:
    document = json.loads((pair / name).read_text())
    document["schema_version"] = 9
    (pair / name).write_text(json.dumps(document))
    if name != "pair.json":
        relist(pair, "target", "onnx")
    assert "schema_version" in the_fault(pair, "ort").found


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": {"type": "BPE"}}', b"\xff"])
def test_a_tokenizer_that_is_none_is_a_fault(pair: Path, content: bytes) -> None:
    for name in ("target/onnx/tokenizer.json", "tokenizer.json"):
        (pair / name).write_bytes(content)
    rewrite(pair / "target/onnx")
    relist(pair, "target", "onnx")
    document = json.loads((pair / "pair.json").read_text())
    document["tokenizer"] = list_files(pair, pair / "tokenizer.json")["tokenizer.json"].model_dump()
    (pair / "pair.json").write_text(json.dumps(document))
    found = faults(pair, "ort")
    assert found[0].check == "tokenizer" and found[0].remedy
    assert {finding.level for finding in found} == {Severity.FAULT}


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(100)])
def test_a_gguf_file_that_is_none_is_a_fault(pair: Path, content: bytes) -> None:
    (pair / "draft/gguf/model.gguf").write_bytes(content)
    relist(pair, "draft", "gguf")
    assert "model.gguf" in the_fault(pair).found


def test_a_model_that_never_ends_is_warned_of_and_an_end_beyond_the_vocabulary_refused(
    exported: Exported, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(exported().path, tmp_path / "bundle"))
    rewrite(bundle, eos_ids=(100_000,))
    assert the_fault(bundle).found == "100000 is no token"
    tokenizer = (bundle / "tokenizer.json").read_text()
    for name in ("<|endoftext|>", "<|im_end|>"):  # which are ends by these names
        tokenizer = tokenizer.replace(name, f"{name}>")
    (bundle / "tokenizer.json").write_text(tokenizer)
    rewrite(bundle, eos_ids=())
    assert (the_fault(bundle).check, the_fault(bundle).level) == ("end of text", Severity.WARNING)


# Chat templates


def template_of(turn: str, asking: str = ASKING, each: str = "messages") -> str:
    return "{% for m in " + each + " %}" + turn + "{% endfor %}" + asking


def findings(
    exported: Exported, tmp_path: Path, template: str, named: Mapping[str, str] = EMPTY
) -> list[Finding]:
    """All that is not well with a bundle that has these templates, and which others it names."""
    bundle = Path(shutil.copytree(exported().path, tmp_path / "bundle"))
    rewrite(bundle, chat_template=template, named_templates=named)
    found = [each for each in examined(bundle) if each.group == "target"]
    return [each for each in found if each.level is not Severity.OK or "by name" in each.found]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for", "does not compile"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
    ],
)
def test_a_template_that_leaves_its_sandbox_or_fails_is_a_fault(
    exported: Exported, tmp_path: Path, template: str, told: str
) -> None:
    (found,) = findings(exported, tmp_path, template)
    assert (found.check, found.level) == ("chat template", Severity.FAULT)
    assert told in found.found


@pytest.mark.parametrize(
    ("template", "check", "level", "told"),
    [
        (template_of(TURN, ""), "turns", Severity.WARNING, "'<|im_start|>assistant', which begins"),
        (
            template_of("<|im_start|>{{ m.role }}\n{{ m.content }}\n\n"),
            *("turns", Severity.WARNING, "but a text in '<|im_end|>': answers may not end"),
        ),
        (
            template_of(TURN, each="messages[:1]"),
            *("turns", Severity.FAULT, "leaves out what was said"),
        ),
        (
            template_of(
                "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TURN
            ),
            *("system", Severity.WARNING, "refuses these messages: none"),
        ),
        (
            template_of("{% if m.role != 'system' %}" + TURN + "{% endif %}"),
            *("system", Severity.WARNING, "the template leaves it out"),
        ),
    ],
    ids=["no-question", "no-end", "turns-lost", "system-refused", "system-lost"],
)
def test_a_template_that_neither_asks_nor_ends_nor_keeps_what_was_said_is_told(
    exported: Exported, tmp_path: Path, template: str, check: str, level: Severity, told: str
) -> None:
    (found,) = findings(exported, tmp_path, template)
    assert (found.check, found.level) == (check, level)
    assert told in found.found and found.remedy


@pytest.mark.parametrize(
    "template",
    [
        template_of(TURN),
        template_of(TURN, "<|im_start|>assistant\n<think>\n"),  # begins the answer itself
        "{{ bos_token }}"
        + template_of(
            "{% if m.role == 'assistant' %} {{ m.content }}<|im_end|>"
            "{% else %}[INST] {{ m.content }} [/INST]{% endif %}",
            "",
        ),
    ],
    ids=["chatml", "thinking", "instructions"],
)
def test_templates_as_they_are_published_have_no_fault(
    exported: Exported, tmp_path: Path, template: str
) -> None:
    assert findings(exported, tmp_path, template) == []


def test_a_template_without_control_tokens_between_messages_is_told(
    exported: Exported, tmp_path: Path
) -> None:
    told = [
        each.found
        for each in findings(exported, tmp_path, template_of("{{ m.role }}: {{ m.content }}\n"))
        if each.check == "chat template"
    ]
    assert len(told) == 1 and "one can imitate others" in told[0]
