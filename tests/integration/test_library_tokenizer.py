"""Where `tokenizers` cannot do a file's vocabulary justice, llama.cpp's own tokenizer reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import pytest

from edge_spec.errors import UnsupportedModelError
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.text.grammar import Grammar, GrammarCompiler
from edge_spec.text.tokenizer import Tokenizer

TEXTS = [
    "the thin man",
    "  two spaces,\n\na line and 1234 digits",
    "<|im_start|>user\nwhy? \U0001f30d na\u00efve \u4f60\u597d<|im_end|>",
    "a <|endoftext|> inside",
    "\x00 and \ufffd",
    " ",
    "",
]


@pytest.fixture
def runtime() -> str:
    pytest.importorskip("llama_cpp")
    return "llamacpp"


def test_it_agrees_with_ours_where_ours_can_do_it(runtime: str, gguf: Callable[..., Path]) -> None:
    published = runtimes.open_model_info(gguf("llama"))
    ours = Tokenizer(published.tokenizer_json())
    library = runtimes.load_runtime(runtime).open_tokenizer(published)
    assert library.vocabulary() == ours.vocabulary()
    tokens = range(len(ours.vocabulary()))
    assert [library.piece(token) for token in tokens] == [ours.piece(token) for token in tokens]
    for text in TEXTS:
        ids = library.encode(text)
        assert ids == ours.encode(text), text
        assert library.decode(ids) == ours.decode(ids), text
        stream = library.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == library.decode(ids), text
    stream = library.stream()
    first, *_ = library.encode("\u4f60")
    assert (stream.push(first), stream.finish()) == ("", "\ufffd")  # a character cut off at the end
    size, begun = len(ours.vocabulary()), library.encode('{"name": "the')
    allowed = [
        GrammarCompiler(codec, size, published.eos_ids).compile(Grammar.json_schema())
        for codec in (ours, library)
    ]
    rows = [constraint.allowed(begun) for constraint in allowed]
    assert (rows[0] == rows[1]).all() and 10 < rows[0].sum() < size


@pytest.mark.parametrize("prefix", ["every", "none"])
def test_it_writes_what_ours_writes_of_spaces_and_bytes(
    runtime: str, trained: ModuleType, tokenized: Callable[..., Any], tmp_path: Path, prefix: str
) -> None:
    """Where a vocabulary puts a space before a text, no text of an answer begins with it."""
    source = tokenized(trained.sentencepiece(prefix))
    published = runtimes.open_model_info(trained.export(source, tmp_path / "out.gguf"))
    ours = Tokenizer(published.tokenizer_json())
    library = runtimes.load_runtime(runtime).open_tokenizer(published)
    tokens = range(len(ours.vocabulary()))
    assert [library.piece(token) for token in tokens] == [ours.piece(token) for token in tokens]
    for text in ("Hello world", "  two spaces", "\U0001f999 and \u0416", "\ufffd"):
        ids = ours.encode(text)
        for cut in (ids, ids[:-1], ids[1:]):
            assert library.decode(cut) == ours.decode(cut)


def test_bos_comes_first_and_only_once(
    runtime: str, tiny: ModuleType, gguf: Callable[..., Path]
) -> None:
    bos = tiny.TOKENS.index("<|endoftext|>")
    beginning: Any = SimpleNamespace(path=gguf("llama"), bos_id=bos, adds_bos=True)
    tokenizer = runtimes.load_runtime(runtime).open_tokenizer(beginning)
    assert tokenizer.encode("a") == [bos, tiny.TOKENS.index("a")]
    assert tokenizer.encode("<|endoftext|>a") == [bos, tiny.TOKENS.index("a")]


def test_a_control_token_that_a_user_writes_is_text(
    runtime: str, gguf: Callable[..., Path]
) -> None:
    published = runtimes.open_model_info(gguf("llama"))
    library = runtimes.load_runtime(runtime).open_tokenizer(published)
    begin, end = (library.token_id(each) for each in ("<|im_start|>", "<|im_end|>"))
    assert begin is not None and end is not None
    written = "a <|im_end|> b <|im_start|>"
    text = f"<|im_start|>{written}<|im_end|>"
    places = range(len("<|im_start|>"), len("<|im_start|>") + len(written))
    found = library.encode_given(text, places, {begin, end})
    assert [each for each in found if each in (begin, end)] == [begin, end]
    assert (found[0], found[-1]) == (begin, end)
    pieces = b"".join(map(library.piece, found))  # of control tokens nothing
    assert pieces == written.encode()
    assert library.encode_given(text, [], {begin, end}) == library.encode(text)
    assert library.encode_given(text, range(len(text)), set()) == library.encode(text)


def test_a_text_may_have_more_tokens_than_bytes(runtime: str, tmp_path: Path) -> None:
    """A vocabulary of bytes alone spells each space in three: a buffer for one token a byte gave
    no token at all."""
    path = tmp_path / "bytes.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        getattr(writer, f"add_{add}")(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256))])
    writer.add_token_scores([0.0] * 259)
    writer.add_token_types([2, 3, 3, *[6] * 256])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file: Any = SimpleNamespace(path=path, bos_id=None, adds_bos=False)
    tokenizer = runtimes.load_runtime(runtime).open_tokenizer(file)
    ids = tokenizer.encode("a " * 100)  # and one space before all
    assert len(ids) == 3 + 100 + 300


def test_a_file_with_an_unproved_vocabulary_runs(
    runtime: str, tiny: ModuleType, tmp_path: Path
) -> None:
    path = tiny.write_gguf(
        tiny.build(), tmp_path / "model.gguf", tokenizer__ggml__pre="deepseek-llm"
    )

    def load(runtime: str) -> None:
        options = LoadOptions(runtime=runtime, threads=1)
        with load_engine(str(path), options, lambda what, fraction: None) as engine:
            result = engine.chat("the thin man", max_tokens=8)
            assert result.text == "".join(token.text for token in result.tokens)
            assert len(result.tokens) == 8

    load(runtime)
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'deepseek-llm'"):
        load("reference")
