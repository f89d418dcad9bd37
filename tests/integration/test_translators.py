"""mBART, M2M-100 and NLLB have a token of each language: around a source, and before an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner

from edge_spec import load
from edge_spec.cli.main import app, run
from edge_spec.diagnostics.device_check import DeviceCheckRequest
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.text.source_end import SourceEnd
from edge_spec.text.tokenizer import Tokenizer
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


def test_what_a_text_says_of_languages_itself_is_taken() -> None:
    tokenizer = Tokenizer(tokenizer_json(), end=END_OF_SOURCE)
    tokenizer = tokenizer.translating(None, "fra_Latn", "it")
    named = tokenizer.encode(f"eng_Latn{SOURCE}")
    assert named[0] == ENGLISH and GERMAN not in named and named[-3:] == [END, END, FRENCH]
    begun = tokenizer.encode(f"eng_Latn{SOURCE}</s></s>deu_Latn")
    assert begun[-3:] == [END, END, GERMAN]


def test_a_forced_language_gives_way_to_the_one_that_is_asked_for() -> None:
    forced = Tokenizer(tokenizer_json(), end=SourceEnd((END, END, ENGLISH), END))
    assert forced.encode(SOURCE)[-3:] == [END, END, ENGLISH]
    asked = forced.translating(None, "fra_Latn", "it")
    assert asked.encode(SOURCE)[-3:] == [END, END, FRENCH]


def test_a_tokenizer_without_languages_is_as_before() -> None:
    end = SourceEnd((END, END), END)
    without = Tokenizer(tokenizer_json(None, ()), end=end)
    assert without.encode(SOURCE)[-2:] == [END, END] and without.source_end == end
    with pytest.raises(UsageError, match=r"no tokens of languages for --target-language"):
        without.translating(None, "fra_Latn", "it")


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


def test_what_generation_config_json_forces_begins_the_answer(write: Callable[..., Path]) -> None:
    path = write("mbart", generation={"forced_bos_token_id": FRENCH, "eos_token_id": END})
    encoder = open_checkpoint(path).config.encoder
    assert encoder is not None and encoder.beginning == (END, FRENCH)
    with load(str(path), runtime="reference", drafter="none") as engine:
        assert engine.encode(SOURCE)[-3:] == [END, END, FRENCH]


def test_a_translator_into_one_language_refuses_others(write: Callable[..., Path]) -> None:
    path = str(write("mbart", AFTER, {"decoder_start_token_id": FRENCH, "eos_token_id": END}))
    with load(path, runtime="reference", drafter="none", source_language="eng_Latn") as engine:
        assert engine.encode(SOURCE)[-3:] == [END, ENGLISH, FRENCH]
        assert engine.generate(SOURCE, max_tokens=5).text
    with pytest.raises(UsageError, match="answers in fra_Latn alone"):
        load(path, runtime="reference", drafter="none", target_language="eng_Latn")


def test_the_command_line_names_languages(write: Callable[..., Path]) -> None:
    arguments = ["generate", str(write()), SOURCE, "--runtime", "reference", "--max-tokens", "4"]
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, UsageError)
    answered = CliRunner().invoke(app, [*arguments, "--target-language", "fra_Latn"])
    assert answered.exit_code == 0, answered.output


def test_models_without_an_encoder_refuse_languages(hf: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="has no encoder"):
        load(str(hf("llama")), runtime="reference", drafter="none", source_language="eng_Latn")


def test_positions_that_files_do_not_have_are_computed(tmp_path: Path) -> None:
    """Pegasus's are Marian's, and those of M2M-100 begin with the third row of fairseq's."""
    weights = families.load("pegasus").weights
    stored = {name: each for name, each in weights.items() if "embed_positions" not in name}
    found = open_checkpoint(families.write_hf("pegasus", tmp_path / "pegasus", stored))
    marian = open_checkpoint(families.write_hf("marian", tmp_path / "marian"))
    table = "encoder.embed_positions.weight"
    np.testing.assert_array_equal(found.float32(table), marian.float32(table))


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"tie_word_embeddings": False}, "a head of its own"),
        ({"pad_token_id": 0}, "positions that begin after the token 0"),
        ({"encoder_ffn_dim": 96}, "an encoder with other ffn_dim"),
        ({"share_encoder_decoder_embeddings": False}, "an embedding of its encoder's own"),
    ],
)
def test_what_a_translator_may_not_have_is_named_before_its_tensors_are(
    changes: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=feature):
        open_checkpoint(families.write_hf("m2m100", tmp_path / "model", **changes))


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


def test_the_check_of_a_device_is_given_the_languages(write: Callable[..., Path]) -> None:
    """Its checks are processes of their own, which read what was asked as text."""
    where = {"device": "cpu", "runtime": "ort"}
    asked = DeviceCheckRequest(str(write()), {**where, "target_language": "fra_Latn"})
    as_read = DeviceCheckRequest(**json.loads(json.dumps(asdict(asked))))
    with as_read.engine() as engine:
        assert engine.encode(SOURCE)[-1] == FRENCH
    with (
        pytest.raises(UsageError, match="nothing says which"),
        replace(asked, asked=where).engine(),
    ):
        pass


def test_doctor_takes_languages(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[DeviceCheckRequest] = []
    monkeypatch.setattr(
        "edge_spec.diagnostics.device_check.run_checks",
        lambda request, progress, add: given.append(request),
    )
    named = ["--source-language", "eng_Latn", "--target-language", "fra_Latn"]
    assert run(["doctor", str(write()), "--run", *named]) == 0
    assert given[0].asked["source_language"] == "eng_Latn"
    assert given[0].asked["target_language"] == "fra_Latn"
