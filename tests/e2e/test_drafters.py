"""Drafters as a user chooses them, on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.loader import load_engine
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.lossless import Promise
from edge_spec.storage.atomic import cache_directory
from fixtures.silence import quiet

pytestmark = pytest.mark.model

PROMPTS = [
    json.loads(line)["prompt"]
    for line in Path("benchmarks/prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
SOME = PROMPTS[4:26:7]
FREE = ["suffix", "recycling", "lookahead", "jacobi", "answers", "corpus"]


@pytest.fixture
def demo_in_float32(demo_gguf):
    plan = ModelPlan(Source("smollm2", quiet), "ort", export=ExportOptions("fp32"))
    return str(plan.prepare(quiet).source.path)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "capitals.txt").write_text("The capital of France is Paris.\n" * 3, encoding="utf-8")
    return folder


@pytest.fixture
def answer_files():
    """The demo model's answers, none when the test begins."""

    def files():
        return list((cache_directory() / "answers").glob("smollm2-*.json"))

    for file in files():
        file.unlink()
    return files


@pytest.mark.usefixtures("free_rows")
@pytest.mark.slow  # on tiny models every drafter is asked by default, too
def test_fp32_text_is_equal_with_every_drafter(demo_in_float32, corpus, tmp_path, monkeypatch):
    # One thread waits for no other: another worker shares the cores.
    options = LoadOptions(runtime="ort", corpora=(corpus,), threads=1)
    with load_engine(demo_in_float32, options, quiet) as engine:
        monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))  # its own answers
        texts = {}
        for names in ["none", *FREE, ",".join(FREE)]:
            engine.set_drafter(names)
            with engine.verifying_all_draft_tokens():  # whether or not they pay
                results = [engine.chat(prompt, max_tokens=32) for prompt in SOME[:2]]
            texts[names] = [[token.id for token in result.tokens] for result in results]
            if names != "none":  # otherwise the comparison would prove nothing
                assert sum(result.stats.draft_n for result in results) > 0
    plain = texts.pop("none")
    assert [names for names, text in texts.items() if text != plain] == []


@pytest.mark.usefixtures("free_rows")
@pytest.mark.slow  # by default tests/e2e/test_lossless.py has drafters that are chosen
def test_drafting_is_bit_identical_although_branches_are_not(demo_gguf):
    """None of them is accepted."""
    options = LoadOptions(runtime="ort", drafter="suffix,recycling,lookahead", lossless="always")
    with load_engine("smollm2", options, lambda what, fraction: None) as engine:
        assert engine.parts.speculation_factory.lossless.promise is Promise.BIT_IDENTICAL
        # The second time the cache holds the first.
        first, second = ([engine.chat(prompt, max_tokens=48) for prompt in SOME] for _ in range(2))
        assert sum(result.stats.draft_n_accepted for result in first + second) > 0
        assert sum(result.stats.near_ties for result in first + second) == 0
        engine.set_drafter("none")
        for prompt, *drafted in zip(SOME, first, second, strict=True):
            plain = [token.id for token in engine.chat(prompt, max_tokens=48).tokens]
            assert [[token.id for token in result.tokens] for result in drafted] == [plain] * 2


def test_each_token_tells_who_drafted_it(edge_spec):
    names = ",".join(FREE[:4])
    prompt = "Repeat three times: one two three four five six."
    done = edge_spec("generate", prompt, "--drafter", names, "--json", "--max-tokens", "40")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    accepted = [token["drafter"] for token in document["tokens"] if token["origin"] == "accepted"]
    counts = document["stats"]["drafters"]
    # "spare-row" where plain steps are padded on this processor
    assert set(counts) <= {*names.split(","), "spare-row"}
    for name, count in counts.items():
        told = sum(name in drafter.split("+") for drafter in accepted)
        assert told == count["draft_n_accepted"] <= count["draft_n"]


def test_a_corpus_is_quoted(demo_gguf, corpus):
    options = LoadOptions(drafter="corpus", corpora=(corpus,), threads=1)
    with load_engine("smollm2", options, lambda what, fraction: None) as engine:
        with engine.verifying_all_draft_tokens():  # whatever was measured here before
            drafted = engine.generate("The capital of France is", max_tokens=24)
        first = drafted.tokens[0]
        assert (first.text, first.drafter) == (" Paris", "corpus")
        engine.set_drafter("none")
        assert engine.generate("The capital of France is", max_tokens=24).text == drafted.text


@pytest.mark.slow  # on tiny models answers are drafted by default
def test_what_was_written_before_is_drafted_in_the_next_run(edge_spec, answer_files):
    """A damaged line of the file is passed over; the answer comes all the same."""
    command = ["generate", "What is the capital of France?", "--drafter", "answers", "--json"]
    command += ["--max-tokens", "64"]  # time to begin again after a disturbance
    first = json.loads(edge_spec(*command).stdout)
    second = json.loads(edge_spec(*command).stdout)
    assert second["text"] == first["text"]
    assert second["stats"]["draft_n_accepted"] > first["stats"]["draft_n_accepted"]
    [file] = answer_files()
    file.write_bytes(file.read_bytes()[:-1])
    third = edge_spec(*command)
    assert third.returncode == 0 and third.stderr == ""
    assert json.loads(third.stdout)["text"] == first["text"]
    assert edge_spec(*command).stderr == ""


@pytest.mark.slow  # every runtime's sessions are held to it on tiny models by default
def test_draft_tokens_never_change_the_logits_of_the_next_turn(demo_in_float32):
    """Branches that were committed and cut leave the cache as plain steps do, in float32."""
    logits = []
    for names in ("none", "recycling,lookahead,suffix"):
        options = LoadOptions(runtime="ort", drafter=names, threads=1)
        with load_engine(demo_in_float32, options, quiet) as engine:
            result = engine.chat(SOME[0], max_tokens=30)
            prompt = engine.chat_prompt(SOME[0]) + [token.id for token in result.tokens]
            again = engine.generate([*prompt, 198], max_tokens=1)
            assert again.stats.cached_n >= len(prompt) - 1
            session = engine._session
            session.rollback(len(prompt))
            logits.append(session.forward(TokenTree.chain(198)).logits[0].copy())
    # Different orders of float32 sums over 30 layers; logits are of the size of 10.
    assert np.abs(logits[0] - logits[1]).max() < 1e-3
