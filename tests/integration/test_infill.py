"""Texts between two others from the SDK, the command line and files that name the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_spec import Engine, SamplingParams
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from fixtures import infill_models

BEFORE, AFTER = "the first line\nthe ", "\nthe first line\nthe last line\n"
FILES = [("a.py", "the first line\nthe second line\n" * 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coder") / "tiny"
    return infill_models.write_model(path, max_position_embeddings=512)


def load(model: Path) -> Engine:
    options = LoadOptions(runtime="reference", context_length=512)
    return load_engine(str(model), options, lambda what, fraction: None)


def no_ends(engine: Engine) -> SamplingParams:
    """A tiny model's answers are of any length only without the tokens that end them."""
    text = engine.parts.text
    return SamplingParams(logit_bias=dict.fromkeys((*text.eos_ids, *text.infill.tokens.all), -100))


@pytest.mark.parametrize("files", [(), FILES])
def test_drafts_change_no_text(model: Path, files: Any) -> None:
    with load(model) as engine, engine.fork() as plain:
        plain.set_drafter("none")
        options: dict[str, Any] = {"max_tokens": 60, "sampling": no_ends(engine)}
        prompt = engine.infill_prompt(BEFORE, AFTER, files, max_tokens=60)
        expected = plain.generate(prompt, **options)
        with engine.verifying_all_draft_tokens():
            drafted = engine.generate(prompt, **options)
        assert drafted.text == expected.text
        assert drafted.stats.draft_n > 0 == expected.stats.draft_n


def test_the_tokens_of_the_form_end_a_text(model: Path) -> None:
    with load(model) as engine:
        prompt = engine.infill_prompt(BEFORE, AFTER)
        assert prompt.ends == engine.parts.text.infill.tokens.all
        sampling = no_ends(engine)
        whole = engine.generate(prompt, max_tokens=20, sampling=sampling)
        assert whole.finish_reason == "length"
        prompt.ends = frozenset((whole.tokens[3].id,))  # as if it were one of them
        ended = engine.generate(prompt, max_tokens=20, sampling=sampling)
        assert ended.finish_reason == "stop" and len(ended.tokens) <= 4


@pytest.mark.parametrize("key", ["fim_{}", "{}"])
def test_keys_of_a_file_name_the_tokens(tiny: object, tmp_path: Path, key: str) -> None:
    """Those of llama.cpp: fim_pre, fim_suf and fim_mid, and the older prefix, suffix, middle."""
    names = ("pre", "suf", "mid") if "fim" in key else ("prefix", "suffix", "middle")
    stated = {
        f"tokenizer__ggml__{key.format(name)}_token_id": 10 + at for at, name in enumerate(names)
    }
    path = tiny.write_gguf(tiny.build("llama"), tmp_path / "tiny.gguf", **stated)  # type: ignore[attr-defined]
    info = open_model_info(path)
    found = [info.special_tokens[f"{name}_token"] for name in ("prefix", "suffix", "middle")]
    assert found == [tiny.TOKENS[10 + at] for at in range(3)]  # type: ignore[attr-defined]
