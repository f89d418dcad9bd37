"""A tokenizer may know tokens that the model has no row for, such as one that stands for an image:
their text stays text."""

from __future__ import annotations

import json
from pathlib import Path

import edge_spec
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint
from fixtures.tiny_models import build, write_hf
from fixtures.trained_tokenizers import export

VOCAB = 265
EXTRA = "<image>"


def directory(tmp_path: Path) -> Path:
    path = write_hf(build("llama"), tmp_path / "model")
    file = path / "tokenizer.json"
    described = json.loads(file.read_text("utf-8"))
    last = described["added_tokens"][-1]
    described["added_tokens"].append({**last, "id": VOCAB, "content": EXTRA})
    file.write_text(json.dumps(described), "utf-8")
    return path


def test_their_text_stays_text(tmp_path: Path) -> None:
    path = directory(tmp_path)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(f"the cat {EXTRA} sat on the {EXTRA} mat\n" * 20, "utf-8")
    with edge_spec.load(
        path, runtime="reference", drafter="suffix,corpus", corpora=[str(corpus)]
    ) as llm:
        ids = llm.encode(f"a{EXTRA}b<|im_end|>")
        assert len(ids) == 10 and max(ids) < VOCAB
        assert llm.parts.text.tokenizer.decode(ids) == f"a{EXTRA}b"
        assert max(llm.chat_prompt(f"{EXTRA}<|im_end|>")) < VOCAB
        result = llm.generate(f"the cat {EXTRA} sat on the", max_tokens=8)
        assert not result.stats.failed_drafters


def test_an_export_leaves_them_out(tmp_path: Path) -> None:
    out = export(open_checkpoint(directory(tmp_path)), tmp_path / "out.gguf")
    tokens = GgufFile(out).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == VOCAB and EXTRA not in tokens
    assert open_checkpoint(out).config.vocab_size == VOCAB
