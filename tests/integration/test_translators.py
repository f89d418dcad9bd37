"""mBART, M2M-100 and NLLB have a token of each language: around a source, and before an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from edge_spec import load
from edge_spec.errors import UsageError
from edge_spec.text.tokenizer import SourceEnd, Tokenizer
from fixtures import families, t5_models
from fixtures import tiny_models as tiny

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
END = 2  # ends sources, and begins the answers of most
LANGUAGES = ("deu_Latn", "eng_Latn", "fra_Latn")
IDS = {name: len(SPECIAL) + number for number, name in enumerate(LANGUAGES)}
GERMAN, ENGLISH, FRENCH = IDS.values()
SOURCE = "translating the cat"
END_OF_SOURCE = SourceEnd((END, END), END)
BEFORE = "deu_Latn $A </s>"  # as mBART-50 and NLLB have it
AFTER = "$A </s> deu_Latn"  # as mBART has it


def tokenizer_json(template: str | None = BEFORE, names: tuple[str, ...] = LANGUAGES) -> str:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    scored = [(name, 0.0) for name in (*SPECIAL, *names)]
    scored += [(piece, -1.0) for piece in t5_models.PIECES[3:]]
    scored += [(letter, -4.0) for letter in letters]
    scored += [(f"<extra_{n}>", -9.0) for n in range(families.VOCABULARY - len(scored))]
    made = Library(models.Unigram(scored, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([*SPECIAL, *names])
    if template is not None:
        tokens = [(name, made.token_to_id(name)) for name in ("</s>", "deu_Latn")]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return made.to_str()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))

    def written(
        name: str = "m2m100", template: str = BEFORE, generation: Mapping[str, Any] | None = None
    ) -> Path:
        directory = families.write_hf(name, tmp_path / "model")
        (directory / "tokenizer.json").write_text(tokenizer_json(template), encoding="utf-8")
        tiny.write_json(directory / "tokenizer_config.json", {})
        if generation is not None:
            tiny.write_json(directory / "generation_config.json", generation)
        return directory

    return written


def test_languages_stand_where_the_tokenizer_has_them() -> None:
    plain = Tokenizer(tokenizer_json()).encode(SOURCE)
    before = Tokenizer(tokenizer_json(), end=END_OF_SOURCE)
    assert before.encode(SOURCE) == [GERMAN, *plain, END, END]
    translating = before.translating("eng_Latn", "fra_Latn", "it")
    assert translating.encode(SOURCE) == [ENGLISH, *plain, END, END, FRENCH]
    assert before.encode(SOURCE) == [GERMAN, *plain, END, END]  # which stays as it was
    after = Tokenizer(tokenizer_json(AFTER), end=SourceEnd((END, FRENCH), FRENCH))
    assert after.encode(SOURCE) == [*plain, END, GERMAN, FRENCH]
    assert after.translating("eng_Latn", None, "it").encode(SOURCE) == [
        *(*plain, END, ENGLISH, FRENCH)
    ]
    legacy = Tokenizer(tokenizer_json(AFTER), end=END_OF_SOURCE)
    found = legacy.translating("eng_Latn", "fra_Latn", "it").encode(SOURCE)
    assert found == [*plain, END, ENGLISH, END, FRENCH]


@pytest.mark.parametrize("name", ["m2m100", "mbart"])
def test_a_translator_answers_in_the_language_that_is_asked_for(
    name: str, write: Callable[..., Path]
) -> None:
    path = str(write(name))
    with pytest.raises(UsageError, match="into 3 languages, and nothing says which") as refused:
        load(path, runtime="reference", drafter="none")
    assert "--target-language" in str(refused.value.remedy)
    with pytest.raises(UsageError, match="no language 'french'"):
        load(path, runtime="reference", drafter="none", target_language="french")
    texts = set()
    for runtime in ("reference", "ort"):
        for language in ("eng_Latn", "fra_Latn"):
            with load(path, runtime=runtime, drafter="suffix", target_language=language) as engine:
                assert engine.encode(SOURCE)[-1] == IDS[language]
                texts.add((runtime, engine.generate(SOURCE, max_tokens=12).text))
    assert len({text for runtime, text in texts if runtime == "reference"}) == 2


def test_a_translator_into_one_language_refuses_others(write: Callable[..., Path]) -> None:
    path = str(write("mbart", AFTER, {"decoder_start_token_id": FRENCH, "eos_token_id": END}))
    with load(path, runtime="reference", drafter="none", source_language="eng_Latn") as engine:
        assert engine.encode(SOURCE)[-3:] == [END, ENGLISH, FRENCH]
        assert engine.generate(SOURCE, max_tokens=5).text
    with pytest.raises(UsageError, match="answers in fra_Latn alone"):
        load(path, runtime="reference", drafter="none", target_language="eng_Latn")


def test_models_without_an_encoder_refuse_languages(hf: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="has no encoder"):
        load(str(hf("llama")), runtime="reference", drafter="none", source_language="eng_Latn")


LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TEXTS = ("the cat x", " a  b\n", "", "caf\u00e9 the")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MBart50Tokenizer", "MBartTokenizer", "NllbTokenizer"])
def test_sources_are_encoded_as_transformers_encodes_them(kind: str, tmp_path: Path) -> None:
    """By tokenizers of transformers' own, with tiny vocabularies."""
    library = pytest.importorskip("transformers")
    pieces = ["\u2581", "\u2581the", "\u2581cat", *LETTERS]
    source, target = ("eng_Latn", "fra_Latn") if kind == "NllbTokenizer" else ("en_XX", "fr_XX")
    vocabulary: Any = [(each, 0.0) for each in SPECIAL] + [(each, -1.0) for each in pieces]
    if kind == "NllbTokenizer":
        names = [*SPECIAL, "\u2581", *LETTERS]
        made = library.NllbTokenizer(vocab={n: i for i, n in enumerate(names)}, merges=[])
    else:
        made = getattr(library, kind)(vocab=vocabulary, src_lang="de_DE", tgt_lang="ro_RO")
    made.save_pretrained(tmp_path)
    json = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    begins = made.convert_tokens_to_ids(target) if kind == "MBartTokenizer" else END
    own = Tokenizer(json, end=SourceEnd((END, begins), begins))
    own = own.translating(source, target, "it")
    made.src_lang = source
    for text in TEXTS:
        expected = made(text).input_ids
        found = own.encode(text)
        assert found[: len(expected)] == expected, text
        assert found[-1] == made.convert_tokens_to_ids(target)
        rest = [begins] if kind == "MBartTokenizer" else [END, found[-1]]
        assert found[len(expected) :] == rest
