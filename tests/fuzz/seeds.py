"""Writes the seeds of the corpus: small valid inputs, and hostile ones that are known.

python tests/fuzz/seeds.py; what is there already stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import targets
from stored import store


def models() -> Iterator[tuple[str, bytes]]:
    tiny = targets.tiny_models
    with TemporaryDirectory() as scratch:
        for variant in ("llama-llama3", "qwen3"):
            model = tiny.build(variant, **{**targets.SMALL, "head_dim": 4})
            path = tiny.write_gguf(model, Path(scratch) / f"{variant}.gguf")
            data = path.read_bytes()
            # The weights may as well be zeros, which the target adds.
            yield "gguf", data[: data.rindex(b".weight") + 64]
        model = tiny.build(**targets.SMALL)
        folder = tiny.write_hf(model, Path(scratch) / "hf")
        for number, name in enumerate(targets.DESCRIPTIONS):
            if (folder / name).exists():
                yield "directory", bytes([number]) + (folder / name).read_bytes()
        yield "directory", b"\3" + json.dumps({"weight_map": {"t": "../../etc/passwd"}}).encode()
        yield "tokenizer", (folder / "tokenizer.json").read_bytes()
    small = {"t": ("F32", np.ones((2, 3), np.float32)), "u": ("F16", np.ones(4, np.float16))}
    yield "safetensors", tiny.safetensors(small)
    long = {"t": {"dtype": "F32", "shape": [10**4000] * 4, "data_offsets": [0, 16]}}
    yield "safetensors", tiny.safetensors_file(long, bytes(16))


# The library's Rust code gives this one up.
PANIC = {
    "version": "1.0",
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "#####",
    },
}
TEMPLATES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m.content | trim }}{% endfor %}",
    "{%- set ns = namespace(i=0) %}{% for m in messages[::-1] if m.role == 'user' %}"
    "{% set ns.i = ns.i + 1 %}{{ ns.i ~ m.content.split('<b>')[-1].lstrip('\n') }}{% endfor %}"
    "{% if tools %}{{ tools | map(attribute='function') | list | tojson(indent=2) }}{% endif %}",
    "{% macro say(m) %}{{ '%s: %s' % (m.role, m.content) }}{% endmacro %}"
    "{% for m in messages %}{{ say(m)|indent(2) }}{{ '{:>9}'.format(m.role) }}{% endfor %}",
    "{% set x %}{{ messages | selectattr('role', 'equalto', 'user') | list }}{% endset %}{{ x }}"
    "{{ x | replace('a', 'bb') | upper }}{{ ['a', x] | join(', ') }}{{ x.rfind('a') }}",
    "{% for a in range(9) recursive %}{{ loop.index }}{% break %}{% endfor %}{{ 2 ** 3 * 4 % 5 }}",
    "{{ 'a' * 10 ** 10 }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}",
    "{{ '%99999999d' % 1 }}{{ '{:99999999}'.format(1) }}",
    "{{ " + "[" * 900 + "]" * 900 + " }}",
)


def texts() -> Iterator[tuple[str, bytes]]:
    for source in TEMPLATES:
        yield "template", source.encode()
    yield "tokenizer", json.dumps(PANIC).encode()
    prompt = {"id": 1, "category": "a", "prompt": "Why?"}
    yield "prompts", "\n".join(map(json.dumps, (prompt, {**prompt, "turns": ["a"]}))).encode()
    yield "prompts", b"[" * 5000
    options = {"max_tokens": 5, "temperature": 0.5, "regex": "a+", "seed": 3}
    for method, params in (
        ("chat", {"messages": [{"role": "user", "content": "hi"}], "options": options}),
        (
            "generate",
            {"prompt": [1, 2, 3], "options": {**options, "regex": None, "lark": "start: A"}},
        ),
        ("restore", {"path": "../a"}),
    ):
        line = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        yield "sidecar", json.dumps(line).encode()
    for reference in ("org/name", "org/name@main", "org/name@v1:a/b.gguf", "../..:/etc/x.gguf"):
        yield "reference", reference.encode()


def described() -> Iterator[tuple[str, bytes]]:
    """JSON files of our own, and binary ones with JSON in them."""
    from edge_spec.core.config import ModelConfig, RopeScaling

    config = ModelConfig("llama", 1, 8, 8, 2, 1, 4, 265, 128, 1e-5, 1e4)
    config = replace(config, rope_scaling=RopeScaling("linear", 2.0))
    entry = {"sha256": hashlib.sha256(b"{}").hexdigest(), "num_bytes": 2}
    manifest = {
        "schema_version": 1,
        "format": "onnx",
        "name": "tiny",
        "architecture": config.to_dict(),
        "tokenizer_sha256": entry["sha256"],
        "chat_template": "{{ messages[0].content }}",
        "eos_ids": [1],
        "bos_id": None,
        "adds_bos": False,
        "quantization": "int4",
        "source_sha256": None,
        "parity": {"kl": 0.1},
        "files": {"tokenizer.json": entry},
    }
    yield "manifest", json.dumps(manifest).encode()
    yield "manifest", json.dumps({**manifest, "files": {"../x": entry, "a\\b": entry}}).encode()
    unbounded = {**config.to_dict(), "hidden_size": 0, "vocab_size": 10**400}
    yield "manifest", json.dumps({**manifest, "architecture": unbounded}).encode()
    yield "manifest", json.dumps({**manifest, "quantization": "int4 block 0"}).encode()
    variant = {
        "format": "gguf",
        "quantization": "q4_0",
        "path": "target/gguf/model.gguf",
        "files": {"target/gguf/model.gguf": entry},
    }
    member = {"name": "a", "num_layers": 1, "source_sha256": None, "variants": [variant]}
    pair = {"name": "p", "kind": None, "target": member, "draft": None, "tokenizer": entry}
    pair |= {"chat_template_sha256": None, "vocabulary": None, "versions": {"edge-spec": "0"}}
    yield "pair", json.dumps(pair).encode()
    description = {
        "model": "m",
        "fingerprint": "f",
        "computing": "c",
        "drafts": [],
        "exact": False,
        "noise": 0.0,
        "plain_s": [0.1],
        "learnt": {"a": [1.0]},
        "note": {"messages": []},
    }
    array = {"name": "tokens", "type": "<i4", "shape": [2]}
    header = json.dumps({"description": description, "arrays": [array]}).encode()
    yield "snapshot", header + b"\0" + bytes(8)
    yield "answers", b"[1, 5, 6]\n[7]"
    yield "answers", f"[-1, {2**70}]\n[]".encode()


if __name__ == "__main__":
    for source in (models(), texts(), described()):
        for name, data in source:
            store(name, data)
