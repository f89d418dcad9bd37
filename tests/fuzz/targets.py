"""What hostile bytes reach: one function for each reader, named as its folder in corpus/.

Each takes the content of a file, or of a line, and does with it what the program would. Any
EdgeSpecError of a sane length is right; any other exception, too much memory or time is a finding.
Only for scripts of this folder and benchmarks/fuzz.py: needs the package, and no fuzzer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from edge_spec.apps.sidecar import sidecar as rpc
from edge_spec.drafters.lookup.answers import KeptAnswers
from edge_spec.engine.snapshot_file import read_snapshot
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.stored_tensor import read_safetensors
from edge_spec.models.bundle import find_member, open_bundle
from edge_spec.models.hub import HubReference
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.plain_messages import plain_messages
from edge_spec.text.prompt_files import read_prompts
from edge_spec.text.template_traits import TemplateTraits, fitted
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import Vocabulary

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures import tiny_models

MAX_MESSAGE_CHARACTERS = 2000
GGUF_BYTES = 1 << 20  # what a header is followed by: zeros, which take no space
TEXT = "Why is the sky blue?\n\u20ac \U0001f600 <|im_end|> 12345"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
    {"role": "user", "content": "Rain in Oslo?"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
VOCABULARY = Vocabulary("0" * 64, 300)
# Files of a Hugging Face directory that a byte of the input chooses from.
DESCRIPTIONS = (
    *("config.json", "tokenizer_config.json", "generation_config.json"),
    *("model.safetensors.index.json", "tokenizer.json"),
)


def attempt(target: Callable[[bytes], None], data: bytes) -> None:
    """Raises AssertionError for an error that is no line of a sane length, and whatever the target
    raises that is no EdgeSpecError."""
    try:
        target(data)
    except EdgeSpecError as error:
        assert len(str(error)) <= MAX_MESSAGE_CHARACTERS, f"{len(str(error))} characters of error"


def gguf(data: bytes) -> None:
    path = _written("model.gguf", data)
    with path.open("r+b") as file:
        file.truncate(max(GGUF_BYTES, len(data)))
    published = open_model_info(path)
    tokenizer = Tokenizer(published.tokenizer_json())
    tokenizer.decode(tokenizer.encode(TEXT))
    _rendered(published.chat_template)


def safetensors(data: bytes) -> None:
    for tensor in read_safetensors(_written("model.safetensors", data)).values():
        tensor.float32()


def directory(data: bytes) -> None:
    model = _workspace() / "directory"
    if not model.exists():
        tiny_models.write_hf(tiny_models.build(**SMALL), model)
    name = DESCRIPTIONS[data[0] % len(DESCRIPTIONS)] if data else DESCRIPTIONS[0]
    before = (model / name).read_bytes() if (model / name).exists() else None
    (model / name).write_bytes(data[1:])
    try:
        checkpoint = open_checkpoint(model)
        [each.tables(1) for each in checkpoint.config.rotations]
        Tokenizer(checkpoint.tokenizer_json()).encode(TEXT)
        _rendered(checkpoint.chat_template)
    finally:
        (model / name).unlink() if before is None else (model / name).write_bytes(before)


def manifest(data: bytes) -> None:
    _written("tokenizer.json", b"{}")
    _written("manifest.json", data)
    bundle = open_bundle(_workspace())
    [each.tables(1) for each in bundle.config.rotations]
    _rendered(bundle.manifest.chat_template)


def pair(data: bytes) -> None:
    _written("pair.json", data)
    try:
        member = find_member(_workspace())
        if member is not None:
            member.path(member.member.formats[0])
    finally:
        (_workspace() / "pair.json").unlink()


def tokenizer(data: bytes) -> None:
    opened = Tokenizer(data.decode("utf-8", "replace"), bos_id=1)
    ids = opened.encode(TEXT)
    opened.decode(ids)
    opened.vocabulary()
    stream = opened.stream()
    "".join(stream.push(token) for token in (*ids, 0, 1, 2**31))
    stream.finish()


def template(data: bytes) -> None:
    _rendered(data.decode("utf-8", "replace"))


def prompts(data: bytes) -> None:
    read_prompts(_written("prompts.jsonl", data), 3)


def snapshot(data: bytes) -> None:
    """data: a header, a zero byte and the arrays; its checksum is made right."""
    header, _, arrays = data.partition(b"\0")
    start = struct.pack("<16sQQ", b"edge-spec chat\0\0", 1, len(header))
    digest = hashlib.sha256(start + bytes(32) + header + arrays).digest()
    read_snapshot(_written("chat.snapshot", start + digest + header + arrays))


def answers(data: bytes) -> None:
    logging.disable()  # it says of each that it is damaged
    header = json.dumps({"answers": 2, "vocabulary": VOCABULARY.sha256}).encode()
    kept = KeptAnswers(_written("answers.json", header + b"\n" + data), VOCABULARY)
    kept.add([1, 5, 6], 0)
    for index in kept.indexes:
        index.following(index.match([5, 6]))


def sidecar(data: bytes) -> None:
    try:
        request = rpc.RpcRequest.parse(data)
        rpc.answer_options(request.params)
    except (rpc.RpcError, EdgeSpecError) as error:
        json.dumps(rpc.failure(1, error))


def reference(data: bytes) -> None:
    parsed = HubReference.parse("hf:" + data.decode("utf-8", "replace"))
    for part in (parsed.repository, parsed.revision, parsed.file or "x"):
        assert ".." not in part.split("/") and not part.startswith("/") and "\\" not in part


TARGETS: Mapping[str, Callable[[bytes], None]] = MappingProxyType(
    {
        target.__name__: target
        for target in (
            *(gguf, safetensors, directory, manifest, pair, tokenizer, template, prompts),
            *(snapshot, answers, sidecar, reference),
        )
    }
)
# Of tiny_models.py's models, what fits into a corpus.
SMALL = MappingProxyType(
    {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
)


@cache
def _directory() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="edge-spec-fuzz-")  # removed when the process ends


def _workspace() -> Path:
    return Path(_directory().name)


def _written(name: str, data: bytes) -> Path:
    path = _workspace() / name
    path.write_bytes(data)
    return path


def _rendered(source: str | None) -> None:
    if source is not None:
        opened = ChatTemplate(source, "<s>", "</s>")
        given = {"enable_thinking": False, "documents": [{"text": TEXT}]}
        for tools in ((), TOOLS):
            opened.render(MESSAGES, tools)
        opened.render(MESSAGES, template_kwargs=given, continue_final_message=True)
        fitted(plain_messages(MESSAGES), TOOLS, TemplateTraits(opened.render))
