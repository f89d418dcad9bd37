"""Reads at which tokens a Hugging Face directory says that texts end."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from edge_spec.errors import ModelFileError
from edge_spec.exporters.hf_files import read_json

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
