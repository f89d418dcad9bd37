"""Texts between two others from the SDK, the command line and files that name the tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edge_spec import AsyncEngine, Engine, SamplingParams
from edge_spec.cli.main import app
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from fixtures import infill_models

BEFORE, AFTER = "the first line\nthe ", "\nthe first line\nthe last line\n"
FILES = {"a.py": "the first line\nthe second line\n" * 4}


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


@pytest.mark.parametrize("files", [None, FILES])
def test_drafts_change_no_text(model: Path, files: dict[str, str] | None) -> None:
    with load(model) as engine, engine.fork() as plain:
        plain.set_drafter("none")
        options: dict[str, Any] = {"max_tokens": 60, "sampling": no_ends(engine), "files": files}
        expected = plain.infill(BEFORE, AFTER, **options)
        with engine.verifying_all_draft_tokens():
            drafted = engine.infill(BEFORE, AFTER, **options)
        assert drafted.text == expected.text
        assert drafted.stats.draft_n > 0 == expected.stats.draft_n
        streamed = engine.infill(BEFORE, AFTER, stream=True, **options)
        assert "".join(chunk.text for chunk in streamed) == expected.text


def test_what_other_files_say_is_drafted(model: Path) -> None:
    """A text that begins like one of them goes on like it."""
    with load(model) as engine:
        quoted = engine.encode("alpha beta gamma delta")
        files = [("a.py", "one = 1\nalpha beta gamma delta\n")]
        prompt = engine.infill_prompt("x", "y", files)
        drafter = SuffixDrafter()
        drafter.begin([*prompt, *quoted[:8]])
        tree = drafter.propose(quoted[7], Budget(6, 8, branches=False))
        assert tree.tokens.tolist() == quoted[7 : 7 + len(tree)] and len(tree) > 3


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


def test_asyncio_and_the_command_line_ask_for_the_same(model: Path) -> None:
    with load(model) as engine:
        expected = engine.infill(BEFORE, AFTER, max_tokens=30).text

    async def ask() -> str:
        async with AsyncEngine(load(model)) as engine:
            return (await engine.infill(BEFORE, AFTER, max_tokens=30)).text

    assert asyncio.run(ask()) == expected
    asked = ["generate", str(model), BEFORE, "--suffix", AFTER, "--max-tokens", "30"]
    told = CliRunner().invoke(app, [*asked, "--runtime", "reference", "--context", "512"])
    assert told.stdout == f"{expected}\n"


def test_a_prompt_that_grows_at_its_end_is_read_on(model: Path) -> None:
    """With the suffix first, only what is typed is read; else the suffix, too."""
    before, after = "the line\n" * 20, "the last line\n" * 10
    with load(model) as engine:
        read = {}
        for first in (False, True):
            for text in (before, before + "x"):
                prompt = engine.infill_prompt(text, after, suffix_first=first)
                stats = engine.generate(prompt, max_tokens=1).stats
                read[first] = stats.prompt_n - stats.cached_n
        assert read[True] <= 3
        assert read[False] > len(engine.encode(after))


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
