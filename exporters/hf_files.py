"""Reads the text and JSON files of a Hugging Face directory, up to a size."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from edge_spec.core.model_info import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from edge_spec.errors import ModelFileError
from edge_spec.models.bundle_files import regular_size

MAX_TEXT_BYTES = 100_000_000  # of a file; a vocabulary of 260,000 tokens takes a third


def read_text(path: Path) -> str:
    """Returns what a file has, in UTF-8. Raises ModelFileError."""
    try:
        size = regular_size(path)
        if size > MAX_TEXT_BYTES:
            raise ModelFileError(
                f"{path} is larger than {MAX_TEXT_BYTES // 10**6} MB",
                remedy="Do not use this model.",
            )
        with path.open(encoding="utf-8") as file:
            return file.read(size)  # characters: no more than that, should it grow
    except FileNotFoundError:
        raise ModelFileError(
            f"no such file: {path}",
            remedy="Expected a Hugging Face directory with config.json, tokenizer.json and "
            "safetensors weights.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"cannot read {path}: {error}", remedy="Download the file again."
        ) from None


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """Returns an object. required: else a file that is missing is empty. Raises ModelFileError."""
    if not required and not path.exists():
        return {}
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} is not JSON: {error}", remedy="Download the file again."
        ) from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} holds no JSON object", remedy="Download the file again.")
    return values


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


TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_MAX_DIGITS = 9  # of a token's number


def stated_ends(path: Path, values: Mapping[str, Any]) -> dict[int, str]:
    """Returns the ends and the files that state each, those of the first file first.

    That file is believed in all. Others add to it: the tokenizer's files, which name a token, and
    config.json as far as its are special tokens, since numbers of another vocabulary are left there
    where a model was made of another one. values: of config.json, with what is usual in the model's
    family. Raises ModelFileError for what is no token.
    """
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", required=False)
    text_config = config.get("text_config")
    numbered = [
        ("generation_config.json", generation),
        ("config.json", values),
        ("config.json", config),
        ("config.json", text_config if isinstance(text_config, dict) else {}),
    ]
    tokenizer_config = read_json(path / TOKENIZER_CONFIG, required=False)
    tokens = _Tokens(path, tokenizer_config)
    files: dict[int, list[str]] = {}
    for file, stated in numbered:
        ids = sorted(token_ids(path / file, "eos_token_id", stated.get("eos_token_id")))
        is_first = not files
        for id in ids:
            if is_first or id in files or tokens.is_special(id):
                files.setdefault(id, []).append(file)
    older = read_json(path / SPECIAL_TOKENS, required=False)
    for file, stated in ((TOKENIZER_CONFIG, tokenizer_config), (SPECIAL_TOKENS, older)):
        name = _named(path / file, stated)
        named = None if name is None else tokens.id(name)
        if named is not None:
            files.setdefault(named, []).append(file)
    return {id: ", ".join(dict.fromkeys(stating)) for id, stating in files.items()}


def token_ids(file: Path, name: str, value: Any) -> list[int]:
    """Reads a token's id or a list of them; none where it is null, or less than zero, by which some
    mean null. Raises ModelFileError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ModelFileError(
            f"{file}: {name} is {reprlib.repr(value)}, expected a token's number",
            remedy="Download the model again.",
        )
    return [token for token in ids if token >= 0]


def _named(file: Path, stated: Mapping[str, Any]) -> str | None:
    """Returns the text of the token that a file of the tokenizer calls its end."""
    token = stated.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None):
        raise ModelFileError(
            f"{file}: eos_token is {reprlib.repr(token)}, expected a token's text",
            remedy="Download the model again.",
        )
    return text


class _Tokens:
    """Looks tokens up in tokenizer_config.json, and in tokenizer.json where that does not list
    them: to read a large one takes a second."""

    def __init__(self, path: Path, tokenizer_config: Mapping[str, Any]) -> None:
        self._path = path
        self._config = tokenizer_config

    def id(self, text: str) -> int | None:
        for added in (self._listed, self._added):
            for each in added:
                if each.get("content") == text and type(each.get("id")) is int:
                    return int(each["id"])
        model = self._tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
        return found if type(found) is int else None

    def is_special(self, id: int) -> bool:
        return any(
            each.get("id") == id and each.get("special") is True
            for each in (self._listed or self._added)
        )

    @cached_property
    def _listed(self) -> Sequence[Mapping[str, Any]]:
        listed = self._config.get("added_tokens_decoder")
        return [
            {**each, "id": int(id)}
            for id, each in (listed.items() if isinstance(listed, dict) else ())
            if isinstance(each, dict) and id.isdecimal() and len(id) <= _MAX_DIGITS
        ]

    @cached_property
    def _added(self) -> Sequence[Mapping[str, Any]]:
        added = self._tokenizer.get("added_tokens")
        return [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []

    @cached_property
    def _tokenizer(self) -> Mapping[str, Any]:
        return read_json(self._path / "tokenizer.json", required=False)
