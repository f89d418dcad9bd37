"""Open a Hugging Face model directory as a checkpoint. Text and JSON files have a size limit."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_spec.core.model_info import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from edge_spec.core.recommended_sampling import RecommendedSampling, recommended_sampling
from edge_spec.errors import ModelFileError, UnknownArchitectureError, UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.families import BY_MODEL_TYPE
from edge_spec.exporters.families.family import (
    Family,
    arranged,
    model_config,
    named_as_ours,
)
from edge_spec.exporters.families.stated import StatedConfig, lacked_feature
from edge_spec.exporters.stored_tensor import StoredTensor, damaged, read_safetensors
from edge_spec.models.bundle import is_below, regular_size

MAX_TEXT_BYTES = 100_000_000  # a vocabulary of 260,000 tokens takes a third


def read_text(path: Path) -> str:
    """Return a UTF-8 file's text. Raises ModelFileError."""
    try:
        size = regular_size(path)
        if size > MAX_TEXT_BYTES:
            raise ModelFileError(
                f"{path} is larger than {MAX_TEXT_BYTES // 10**6} MB",
                remedy="Do not use this model.",
            )
        with path.open(encoding="utf-8") as file:
            return file.read(size)  # characters: a limit even if the file grows
    except FileNotFoundError:
        raise ModelFileError(
            f"no such file: {path}",
            remedy="Expected a Hugging Face directory with config.json, tokenizer.json and "
            "safetensors weights.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(f"cannot read {path}: {error}") from None


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """Return a JSON object, {} for a missing file unless `required`. Raises ModelFileError."""
    if not required and not path.exists():
        return {}
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise damaged(f"{path} holds no JSON object")
    return values


CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER = "tokenizer.json"
FILE, OLD_FILE = "chat_template.jinja", "chat_template.json"
FOLDER = "additional_chat_templates"  # further templates, NAME.jinja


class Files:
    """A model's JSON files, each read once: a large tokenizer takes a second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[str, Mapping[str, Any]] = {}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        """Raises ModelFileError. Only config.json must exist."""
        if name not in self._read:
            self._read[name] = read_json(self.path / name, required=name == CONFIG)
        return self._read[name]


_LISTS = ("additional_special_tokens", "extra_special_tokens")


def _template_fields(files: Files) -> dict[str, Any]:
    templates = _of_files(files.path)
    for stated in (files[OLD_FILE], files[TOKENIZER_CONFIG]):
        if DEFAULT_TEMPLATE not in templates:
            templates = named_templates(stated.get("chat_template")) | templates
    return {**template_fields(templates), "special_tokens": _special_tokens(files)}


def template_fields(templates: Mapping[str, str]) -> dict[str, Any]:
    """Return the `ModelInfo` fields of templates. The first that is not for tools replaces a
    missing default."""
    names = sorted(templates, key=lambda name: (name != DEFAULT_TEMPLATE, name == TOOL_TEMPLATE))
    return {
        "chat_template": templates[names[0]] if names else None,
        "named_templates": {n: each for n, each in templates.items() if n != DEFAULT_TEMPLATE},
    }


def named_templates(stated: Any) -> dict[str, str]:
    """Return templates by name, from a single one, a list or a mapping."""
    if isinstance(stated, str):
        return {DEFAULT_TEMPLATE: stated}
    if isinstance(stated, list):  # the form of tokenizer_config.json
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


def _special_tokens(files: Files) -> dict[str, str | tuple[str, ...]]:
    """Return each named token's text; "" for null, so that templates do not get it."""
    stated = dict(files[TOKENIZER_CONFIG])
    older = files[SPECIAL_TOKENS]
    stated |= {name: token for name, token in older.items() if stated.get(name) is None}
    found: dict[str, str | tuple[str, ...]] = {}
    for name, value in stated.items():
        if name in _LISTS and isinstance(value, dict):  # a mapping by name
            found |= {each: text for each, token in value.items() if (text := _text(token))}
        elif name in _LISTS and isinstance(value, list):
            found[name] = tuple(filter(None, map(_text, value)))
        elif name.endswith("_token") and not isinstance(value, bool):  # not add_bos_token
            found[name] = _text(value)
    return found


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


_MAX_DIGITS = 9  # of a token ID


def _stated_ends(files: Files, values: Mapping[str, Any]) -> dict[int, str]:
    """Return the end tokens and the files that name each, the first file's first.

    The first file counts in full. The tokenizer's files add theirs, config.json only special
    tokens: it may keep IDs of the vocabulary that a model was made from. values: config.json with
    the family's defaults. Raises ModelFileError for invalid tokens.
    """
    text_config = files[CONFIG].get("text_config")
    numbered = [
        (GENERATION, files[GENERATION]),
        (CONFIG, values),
        (CONFIG, files[CONFIG]),
        (CONFIG, text_config if isinstance(text_config, dict) else {}),
    ]
    found: dict[int, list[str]] = {}
    for file, stated in numbered:
        ids = sorted(_token_ids(files.path / file, "eos_token_id", stated.get("eos_token_id")))
        is_first = not found
        for id in ids:
            if is_first or id in found or _added_tokens(files).get(id, {}).get("special") is True:
                found.setdefault(id, []).append(file)
    for file in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        token = files[file].get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str | None):
            told = f"eos_token is {reprlib.repr(token)}, expected a token's text"
            raise damaged(f"{files.path / file}: {told}")
        named = None if text is None else _token_id(files, text)
        if named is not None:
            found.setdefault(named, []).append(file)
    return {id: ", ".join(dict.fromkeys(stating)) for id, stating in found.items()}


def _token_ids(file: Path, name: str, value: Any) -> list[int]:
    """Return a list of IDs; null and negative ones mean none. Raises ModelFileError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise damaged(f"{file}: {name} is {reprlib.repr(value)}, expected a token's number")
    return [token for token in ids if token >= 0]


def _token_id(files: Files, text: str) -> int | None:
    for id, each in _added_tokens(files).items():
        if each.get("content") == text:
            return id
    model = files[TOKENIZER].get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if type(found) is int else None


def _added_tokens(files: Files) -> dict[int, dict[str, Any]]:
    """Prefer tokenizer_config.json: a large tokenizer.json takes a second to read."""
    listed = files[TOKENIZER_CONFIG].get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        return {
            int(id): each
            for id, each in listed.items()
            if isinstance(each, dict) and id.isdecimal() and len(id) <= _MAX_DIGITS
        }
    added = files[TOKENIZER].get("added_tokens")
    entries = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return {each["id"]: each for each in entries if type(each.get("id")) is int}


_OF_ANSWERS = ("decoder_start_token_id", "forced_bos_token_id")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN = 200  # characters of a name in messages


def open_directory(path: Path) -> StoredCheckpoint:
    """Raises ModelFileError for missing or damaged files, UnknownArchitectureError for a family,
    UnsupportedModelError for a feature."""
    files = Files(path)
    family = _known_family(path, files[CONFIG])
    values = {**family.defaults, **files[CONFIG], **_of_text(path, files[CONFIG])}
    values |= {usual: values[own] for usual, own in family.keys.items() if own in values}
    # transformers 5 keeps the first tokens of answers only there.
    beginning = {key: files[GENERATION].get(key) for key in _OF_ANSWERS}
    values |= {key: value for key, value in beginning.items() if value is not None}
    stated = StatedConfig(values, path / "config.json")
    lacked = lacked_feature(values, family.computes)
    if lacked is not None:
        raise stated.refuse(lacked)
    stored = named_as_ours(family, without_mtp(values, read_weights(path)))
    config = model_config(family, stated, stored)
    if family.of_tensors is not None:
        stored = family.of_tensors(config, stored)
    tensors = arranged(config, stored)
    if config.tied_embeddings:
        tensors.pop("lm_head.weight", None)
    return StoredCheckpoint(path=path, config=config, tensors=tensors, **text_fields(files, values))


def text_fields(files: Files, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `ModelInfo` fields of text. values: config.json's. Raises ModelFileError; for a
    missing tokenizer, only when it is read."""
    path, ends = files.path, _stated_ends(files, values)
    bos_ids = _token_ids(path / CONFIG, "bos_token_id", values.get("bos_token_id"))
    return {
        **_template_fields(files),
        "eos_ids": tuple(ends),
        "end_sources": ends,
        "bos_id": bos_ids[0] if bos_ids else None,
        "adds_bos": _adds_bos(files, bos_ids),
        "read_tokenizer": lambda: read_text(path / TOKENIZER),
        "sampling": _sampling(files[GENERATION]),
    }


def read_weights(path: Path, names: str = SINGLE) -> dict[str, StoredTensor]:
    """Return all tensors of a directory. Raises as `weight_files` and `read_safetensors`."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(path, names):
        tensors |= read_safetensors(file)
    return tensors


def weight_files(path: Path, names: str = SINGLE) -> list[Path]:
    """Return the safetensors files in INDEX, or without one those that match `names`.

    Raises ModelFileError, and UnsupportedModelError for pickled weights.
    """
    if (path / INDEX).exists():
        files = [path / name for name in _indexed(path)]
    else:
        files = sorted(path.glob(names))
    if not files and only_pickled(path):
        raise UnsupportedModelError(
            f"the weights in {path} are pickled, which may run any code when it is opened",
            remedy="Convert them to safetensors, with PyTorch: safetensors.torch.save_file("
            'torch.load(FILE, weights_only=True), "model.safetensors").',
        )
    for file in files or [path / SINGLE]:
        if file.suffix != ".safetensors":
            raise damaged(f"{path / INDEX} names {file.name}, which is no safetensors file")
        try:
            regular_size(file)  # opening a pipe would block
        except OSError as error:
            raise damaged(f"cannot read {file}: {error}") from None
    return files


def only_pickled(path: Path) -> bool:
    stored = next(path.glob("*.safetensors"), None)
    return stored is None and any(next(path.glob(kind), None) for kind in _PICKLED)


def _indexed(path: Path) -> list[str]:
    names = read_json(path / INDEX).get("weight_map")
    if not (isinstance(names, dict) and names and all(isinstance(f, str) for f in names.values())):
        raise damaged(f"{path / INDEX} has no weight_map")
    files = sorted(set(names.values()))
    for file in files:
        if "/" in file or not is_below(file):
            raise ModelFileError(
                f"{path / INDEX} names a file outside the directory: {file[:_SHOWN]!r}",
                remedy="Do not use this model.",
            )
    return files


def _sampling(generation: Mapping[str, Any]) -> RecommendedSampling:
    """Read recommended sampling. `do_sample` false means temperature 0, whatever else is there;
    true without a temperature means 1."""
    samples = generation.get("do_sample")
    if samples is False:
        return recommended_sampling({**generation, "temperature": 0.0})
    stated = dict(generation)
    if samples is True and stated.get("temperature") is None:
        stated["temperature"] = 1.0
    return recommended_sampling(stated)


def _adds_bos(files: Files, bos_ids: Sequence[int]) -> bool:
    """Return whether texts begin with BOS. If tokenizer_config.json does not say (Llama 3),
    tokenizer.json does."""
    stated = files[TOKENIZER_CONFIG].get("add_bos_token")
    if stated is not None or not bos_ids:
        return bool(stated)
    processor = files[TOKENIZER].get("post_processor") or {}
    try:
        if processor.get("type") in ("RobertaProcessing", "BertProcessing"):
            return bool(processor["cls"][1] == bos_ids[0])
        for template in (processor, *processor.get("processors", ())):
            if template.get("type") == "TemplateProcessing":
                first = template["single"][0]["SpecialToken"]["id"]
                return bool(template["special_tokens"][first]["ids"][0] == bos_ids[0])
    except (AttributeError, IndexError, KeyError, TypeError):  # no special token first
        return False
    return False


def _known_family(path: Path, values: Mapping[str, Any]) -> Family:
    architecture = str(values.get("model_type"))
    family = BY_MODEL_TYPE.get(architecture)
    if family is None:
        lacked = lacked_feature(values)
        raise UnknownArchitectureError(
            f"{path / 'config.json'}: model_type is {reprlib.repr(architecture)}"
            + (f", which has {lacked}" if lacked else ""),
            remedy=f"Readable: {', '.join(BY_MODEL_TYPE)}. Else, without an encoder: "
            "edge-spec export MODEL OUT --format optimum.",
        )
    return family


def _of_text(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    found = values.get("text_config", {})
    if not isinstance(found, dict):
        raise damaged(
            f"{path / 'config.json'}: text_config is {reprlib.repr(found)}, expected an object"
        )
    return found


NUM_MTP = "num_nextn_predict_layers"  # in config.json
MIMO_PREFIX = "model.mtp_layers.0."


def mtp_prefix(values: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Returns what the names of the first layer for multi-token prediction begin with. values: of
    config.json; None where it states none, or where there is none."""
    if not values.get(NUM_MTP):
        return None
    prefixes = (MIMO_PREFIX, f"model.layers.{values.get('num_hidden_layers')}.")
    known = list(names)
    return next((each for each in prefixes if any(n.startswith(each) for n in known)), None)


def without_mtp(
    values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Returns a model's tensors without those of layers for multi-token prediction, which it
    computes nothing from."""
    count, first = values.get(NUM_MTP), values.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(first, int):
        return dict(stored)
    layers = tuple(f"model.layers.{first + each}." for each in range(min(count, 64)))
    return {n: t for n, t in stored.items() if not n.startswith(("model.mtp_layers.", *layers))}
