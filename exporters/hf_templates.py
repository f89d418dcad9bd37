"""Reads the chat templates of a Hugging Face directory, and the special tokens that they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_spec.core.model_info import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from edge_spec.exporters.hf_files import read_json, read_text

FILE, OLD_FILE = "chat_template.jinja", "chat_template.json"
FOLDER = "additional_chat_templates"  # of other ones, NAME.jinja
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def template_fields(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a `ModelInfo` says of templates. Raises ModelFileError."""
    templates = _of_files(path)
    for stated in (read_json(path / OLD_FILE, required=False), tokenizer_config):
        if DEFAULT_TEMPLATE not in templates:
            templates = named_templates(stated.get("chat_template")) | templates
    return {
        "chat_template": default_of(templates),
        "named_templates": {n: each for n, each in templates.items() if n != DEFAULT_TEMPLATE},
        "special_tokens": _special_tokens(path, tokenizer_config),
    }


def default_of(templates: Mapping[str, str]) -> str | None:
    """Returns the template of conversations without tools: where none is named so, the first that
    is not for tools."""
    names = sorted(templates, key=lambda name: (name != DEFAULT_TEMPLATE, name == TOOL_TEMPLATE))
    return templates[names[0]] if names else None


def named_templates(stated: Any) -> dict[str, str]:
    """Returns templates by name, as they are stated: one, a list of named ones, or a mapping."""
    if isinstance(stated, str):
        return {DEFAULT_TEMPLATE: stated}
    if isinstance(stated, list):  # as transformers writes several into tokenizer_config.json
        entries = [entry for entry in stated if isinstance(entry, dict)]
        stated = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(stated, dict):
        return {}
    return {
        name: template
        for name, template in stated.items()
        if isinstance(name, str) and isinstance(template, str)
    }


def _of_files(path: Path) -> dict[str, str]:
    files = {each.stem: each for each in sorted((path / FOLDER).glob("*.jinja"))}
    if (path / FILE).exists():
        files[DEFAULT_TEMPLATE] = path / FILE
    return {name: read_text(file) for name, file in files.items()}


def _special_tokens(
    path: Path, tokenizer_config: Mapping[str, Any]
) -> dict[str, str | tuple[str, ...]]:
    """Returns the text of each token that is stated by name, and "" where null is stated: then a
    template is not given it, whatever config.json has."""
    stated = dict(tokenizer_config)
    older = read_json(path / "special_tokens_map.json", required=False)
    stated |= {name: token for name, token in older.items() if stated.get(name) is None}
    found: dict[str, str | tuple[str, ...]] = {}
    for name, value in stated.items():
        if name in _LISTS and isinstance(value, dict):  # by names of their own
            found |= {each: text for each, token in value.items() if (text := _text(token))}
        elif name in _LISTS and isinstance(value, list):
            found[name] = tuple(filter(None, map(_text, value)))
        elif name.endswith("_token") and not isinstance(value, bool):  # add_bos_token is one
            found[name] = _text(value)
    return found


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
