"""Every chat template of a model goes with it: from its files through exports, to who answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.exporters.hf_source import open_directory
from edge_spec.loader import load
from edge_spec.models.bundle import open_bundle
from edge_spec.models.hub import HubReference, choose
from edge_spec.models.model_text import text_of_bundle
from edge_spec.models.runtimes import load_exporter
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.tools.formats import FORMATS
from fixtures.echo_model import byte_tokenizer
from fixtures.silence import quiet

UNCHECKED = ExportOptions(check=False)
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PLAIN = "{{ bos_token }}D {{ messages[-1].content }}"
USING = "T {% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[-1].content }}"
QUOTING = "R {{ documents[0].text }} {{ messages[-1].content }}"
NAMED = {"default": PLAIN, "tool_use": USING, "rag": QUOTING}
LISTED = [{"name": name, "template": template} for name, template in NAMED.items()]
CONFIG, OLD = "tokenizer_config.json", "chat_template.json"
JINJA, FOLDER = "chat_template.jinja", "additional_chat_templates"


def directory(tiny: ModuleType, path: Path, files: dict[str, Any]) -> Path:
    """A model with these files, and no template beside theirs."""
    made = Path(tiny.write_hf(tiny.build(), path / "model"))
    tiny.write_json(made / CONFIG, {})
    for name, content in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (made / name).write_text(text, encoding="utf-8")
    return made


def text_of(source: Any) -> ChatFormat:
    return ChatFormat(
        tokenizer=byte_tokenizer(),
        chat_template=source.chat_template,
        eos_ids=(),
        bos_id=None,
        named_templates=source.named_templates,
        special_tokens=source.special_tokens,
    )


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({CONFIG: {"chat_template": "c"}}, {"default": "c"}),
        ({OLD: {"chat_template": "o"}}, {"default": "o"}),
        (
            {JINJA: "j", OLD: {"chat_template": "o"}, CONFIG: {"chat_template": "c"}},
            {"default": "j"},
        ),
        ({OLD: {"chat_template": "o"}, CONFIG: {"chat_template": "c"}}, {"default": "o"}),
        ({CONFIG: {"chat_template": LISTED}}, NAMED),
        ({OLD: {"chat_template": NAMED}}, NAMED),  # a mapping
        ({JINJA: "j", f"{FOLDER}/tool_use.jinja": "t"}, {"default": "j", "tool_use": "t"}),
        (
            {f"{FOLDER}/rag.jinja": "r", CONFIG: {"chat_template": "c"}},
            {"default": "c", "rag": "r"},
        ),
        # files go before what tokenizer_config.json lists, all of it
        ({JINJA: "j", CONFIG: {"chat_template": LISTED}}, {"default": "j"}),
        # without a default, the first that is not for tools
        (
            {CONFIG: {"chat_template": LISTED[1:]}},
            {"default": QUOTING, "tool_use": USING, "rag": QUOTING},
        ),
        ({CONFIG: {"chat_template": LISTED[1:2]}}, {"default": USING, "tool_use": USING}),
        ({CONFIG: {"chat_template": [{"name": "a"}, 5, {"name": 1, "template": "x"}]}}, {}),
        ({CONFIG: {"chat_template": None}, OLD: {}}, {}),
    ],
)
def test_templates_of_a_directory(
    tiny: ModuleType, tmp_path: Path, files: dict[str, Any], templates: dict[str, str]
) -> None:
    opened = open_directory(directory(tiny, tmp_path, files))
    default = {} if opened.chat_template is None else {"default": opened.chat_template}
    assert {**default, **opened.named_templates} == templates


@pytest.mark.parametrize(
    ("config", "older", "tokens"),
    [
        (
            {"bos_token": "<s>", "pad_token": {"content": "<p>"}, "add_bos_token": True},
            {},
            {"bos_token": "<s>", "pad_token": "<p>"},
        ),
        ({"bos_token": None}, {}, {"bos_token": ""}),
        (
            {"eos_token": None},
            {"eos_token": "</s>", "cls_token": "C"},
            {"eos_token": "</s>", "cls_token": "C"},
        ),
        ({"image_token": "<i>"}, {}, {"image_token": "<i>"}),
        ({"extra_special_tokens": {"image_token": "<i>"}}, {}, {"image_token": "<i>"}),
        (
            {"additional_special_tokens": ["<a>", {"content": "<b>"}, 5]},
            {},
            {"additional_special_tokens": ("<a>", "<b>")},
        ),
    ],
)
def test_special_tokens_of_a_directory(
    tiny: ModuleType, tmp_path: Path, config: Any, older: Any, tokens: Any
) -> None:
    files = {CONFIG: config, "special_tokens_map.json": older}
    assert open_directory(directory(tiny, tmp_path, files)).special_tokens == tokens


def test_tools_have_a_template_of_their_own(tiny: ModuleType, tmp_path: Path) -> None:
    files = {CONFIG: {"chat_template": LISTED, "bos_token": "<s>"}}
    text = text_of(open_directory(directory(tiny, tmp_path, files)))
    assert text.rendered(USER) == "<s>D hi"
    assert text.template_variables == {"messages", "tools"}


CALLING = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
)


def test_a_template_for_tools_tells_how_calls_are_written(tiny: ModuleType, tmp_path: Path) -> None:
    files = {JINJA: PLAIN, f"{FOLDER}/tool_use.jinja": CALLING}
    text = text_of(open_directory(directory(tiny, tmp_path, files)))
    assert text.knows_tools and text.tool_form() == FORMATS["hermes"]
    assert text.rendered(USER, TOOLS) == json.dumps(TOOLS) + "hi"
    assert text.rendered(USER) == "D hi"


@pytest.mark.parametrize("format", ["onnx", "gguf"])
def test_exports_keep_templates_and_tokens(tiny: ModuleType, tmp_path: Path, format: str) -> None:
    tokens = {"bos_token": "<|im_start|>", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    files = {CONFIG: {"chat_template": LISTED, **tokens}}
    source = directory(tiny, tmp_path, files)
    out = tmp_path / ("out.gguf" if format == "gguf" else "out")
    load_exporter(format).export(open_directory(source), out, UNCHECKED, quiet)
    text = text_of(open_model_info(out)) if format == "gguf" else text_of_bundle(open_bundle(out))
    assert text.chat_template == PLAIN
    assert text.named_templates == {name: NAMED[name] for name in ("tool_use", "rag")}
    expected = tokens | ({"bos_token": "<|endoftext|>"} if format == "gguf" else {})  # its id
    assert text.special_tokens == expected


def test_named_templates_of_a_gguf_file(tiny: ModuleType, tmp_path: Path) -> None:
    named = {"tool_use": USING, "rag": QUOTING}
    keys = {f"tokenizer__chat_template__{name}": template for name, template in named.items()}
    opened = open_model_info(Path(tiny.write_gguf(tiny.build(), tmp_path / "m.gguf", **keys)))
    assert opened.chat_template == tiny.TEMPLATE and opened.named_templates == named
    assert opened.special_tokens == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }


def test_a_model_with_named_templates_alone_answers(tiny: ModuleType, tmp_path: Path) -> None:
    model = directory(tiny, tmp_path, {f"{FOLDER}/rag.jinja": "{{ messages[0].content }}"})
    with load(str(model), runtime="reference", drafter="none") as engine:
        assert engine.chat_prompt("hi") == engine.encode("hi")


def test_the_hub_is_asked_for_all_files_of_templates() -> None:
    wanted = [JINJA, OLD, f"{FOLDER}/rag.jinja", CONFIG, "special_tokens_map.json"]
    others = ["config.json", "tokenizer.json", "model.safetensors"]
    unwanted = [f"{FOLDER}/a/b.jinja", f"{FOLDER}/a.txt", "other.jinja", "README.md"]
    chosen = choose(HubReference.parse("hf:org/one"), [*wanted, *others, *unwanted])
    assert set(chosen) == {*wanted, *others}
