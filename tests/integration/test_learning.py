"""Learning from answers: a head drafts once it is forecast to pay, no text changes by it, and what
is interrupted, damaged or forgotten leaves what is whole."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.cli.main import run
from edge_spec.core.config import ModelConfig
from edge_spec.core.sampling import SamplingParams
from edge_spec.distill import idle_learning
from edge_spec.distill.idle_learning import (
    Learner,
    LearntFolder,
    folder_of,
    kept_folders,
    require_learnable,
    start_learning,
    train_head,
)
from edge_spec.engine.engine import Engine
from edge_spec.errors import (
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.loader import load_asked
from edge_spec.loader.head import StoredTables, open_tables
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source
from fixtures import family_gguf, hybrid_models, t5_models

VOCAB, PATIENCE_S = 265, 60.0
ASKED = AskedOptions(runtime="reference", threads=1)
# Rows that cost next to nothing, and rows that cost a step each, which no draft token is worth.
CHEAP = {1: 0.05, 2: 0.0501, 4: 0.0502, 8: 0.0504, 16: 0.0508}
DEAR = {1: 0.05, 2: 0.1, 4: 0.2, 8: 0.4, 16: 0.8}
REPORT = {"until": 4, "tokens": {"learnt": 450}, "forecast": {"speedup": 1.25}}


def quiet(what: str, fraction: float) -> None:
    """Tells nobody."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def torch() -> None:
    pytest.importorskip("torch")


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", num_hidden_layers=2, max_position_embeddings=1024)
    return Path(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


@pytest.fixture
def folder() -> LearntFolder:
    folder = folder_of("hf", "0")
    folder.make()
    return folder


class Rule:
    """Answers in which each token has one that follows it, in states that score it highest."""

    def __init__(self, target: Path) -> None:
        tables = open_tables(Source(str(target), quiet), "a rule reads")
        self.config: ModelConfig = tables.config
        self._output = StoredTables(tables).output_rows(None)
        self._order = np.random.default_rng(7).permutation(VOCAB)

    def answer(self, start: int, count: int = 150) -> tuple[list[int], np.ndarray, np.ndarray]:
        tokens = self._order[(start + np.arange(count)) % VOCAB]
        rows = self._output[tokens]
        states = 6 * rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return [int(self._order[(start - 1) % VOCAB])], tokens, states

    def fill(self, folder: LearntFolder, count: int = 10) -> None:
        for index in range(count):
            folder.add(*self.answer(24 * index))


@pytest.fixture
def rule(target: Path) -> Rule:
    return Rule(target)


def told(target: Path, passes_s: dict[int, float]) -> dict[str, Any]:
    return {"model": str(target), "passes_s": passes_s, "eos_ids": []}


# What is kept.


def test_all_that_is_kept_is_for_the_user_alone_and_within_a_bound(
    folder: LearntFolder, rule: Rule
) -> None:
    rule.fill(folder)
    found = list(folder.examples(folder.answers(), rule.config))
    prompt, tokens, states = rule.answer(24)
    assert found[1].conversation.tokens.tolist() == [*prompt, *tokens]
    assert found[1].conversation.is_held_out and not found[0].conversation.is_held_out
    np.testing.assert_allclose(found[1].features[:, 0], states, rtol=1e-3, atol=1e-4)
    assert found[1].anchors[0] == 0 and len(found[1].features) == len(tokens)
    if os.name != "nt":
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        for path in folder.path.glob("answers/*"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    size = folder.num_bytes
    replace(folder, max_bytes=size * 6 // 10).add(*rule.answer(5))
    assert [each.number for each in folder.answers()] == list(range(5, 11))


def test_a_damaged_answer_is_left_out(
    folder: LearntFolder, rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    rule.fill(folder, 5)
    paths = sorted(folder.path.glob("answers/*"))
    paths[0].write_bytes(paths[0].read_bytes()[:-500])
    folder.add(*rule.answer(9, 20))
    strange = rule.answer(9, 20)
    folder.add(strange[0], strange[1] + VOCAB, strange[2])
    folder.add(strange[0], strange[1], strange[2][:, :32])
    assert len(list(folder.examples(folder.answers(), rule.config))) == 5
    assert caplog.text.count("is damaged and is left out") == 3
    assert len(folder.answers()) == 5


# How it learns.


@pytest.mark.usefixtures("torch")
def test_a_head_learns_what_answers_say_and_another_one_waits_for_new_ones(
    folder: LearntFolder, target: Path, rule: Rule
) -> None:
    rule.fill(folder, 3)
    assert not folder.has_work()
    rule.fill(folder, 7)
    assert folder.has_work()
    train_head(folder, told(target, CHEAP), quiet)
    assert folder.report() is not None
    report = json.loads((folder.head / "report.json").read_bytes())
    assert report["history"][0]["of_position"][0] < 0.05 < 0.1 < report["acceptance"][0]
    assert report["pays"] and report["until"] == 10
    assert report["tokens"] == {"learnt": 9 * 150, "held_out": 150}
    assert not folder.training.exists() and not folder.has_work()
    rule.fill(folder, 7)
    assert folder.has_work()
    train_head(folder, told(target, DEAR), quiet)
    found = folder.report()
    assert found is not None and not found.pays and found.until == 17


@pytest.mark.usefixtures("torch")
def test_an_interrupted_training_goes_on_although_more_was_answered(
    folder: LearntFolder, target: Path, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule.fill(folder)
    monkeypatch.setattr(idle_learning, "_KEPT_EVERY_S", -1.0)  # after each step

    class KilledError(BaseException):
        """As nothing is done when a process is killed, nothing is done for this."""

    def kill(what: str, fraction: float) -> None:
        if fraction > 0.05:
            raise KilledError

    with pytest.raises(KilledError):
        train_head(folder, told(target, CHEAP), kill)
    assert folder.unfinished() == 10 and not folder.head.exists()
    rule.fill(folder, 1)
    fractions: list[float] = []
    train_head(folder, told(target, CHEAP), lambda what, fraction: fractions.append(fraction))
    found = folder.report()
    assert fractions[0] > 0.04 and found is not None and found.until == 10


@pytest.mark.usefixtures("torch")
def test_a_training_stops_where_the_machine_is_needed(
    folder: LearntFolder, target: Path, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule.fill(folder)
    monkeypatch.setattr(idle_learning, "_LOOKED_EVERY_S", 0.0)
    monkeypatch.setattr(idle_learning, "give_way", lambda nice: None)
    given = told(target, CHEAP) | {"folder": str(folder.path), "most_s": 1e9}
    with monkeypatch.context() as patched:
        patched.setattr(idle_learning, "on_battery", lambda: True)
        idle_learning.learn_while_idle(json.dumps(given))
    assert folder.unfinished() == 10 and not folder.head.exists()
    idle_learning.learn_while_idle(json.dumps(given))
    assert folder.head.exists()


@pytest.mark.usefixtures("torch")
def test_what_is_forgotten_while_it_is_learnt_from_is_not_written_again(
    folder: LearntFolder, target: Path, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule.fill(folder)
    monkeypatch.setattr(idle_learning, "give_way", lambda nice: None)
    steps = idle_learning._Watch.__call__

    def forget(self: Any, what: str, fraction: float) -> None:
        if fraction > 0.05 and folder.path.exists():
            assert folder.forget() > 0
        steps(self, what, fraction)

    monkeypatch.setattr(idle_learning._Watch, "__call__", forget)
    given = told(target, CHEAP) | {"folder": str(folder.path), "most_s": 1e9}
    idle_learning.learn_while_idle(json.dumps(given))
    assert kept_folders() == []


# The engine, with a learner beside it.


@pytest.fixture(
    params=["reference", pytest.param("llamacpp", marks=pytest.mark.slow), "llamacpp, Qwen 3.5"]
)
def place(
    request: pytest.FixtureRequest, tiny: ModuleType, target: Path, tmp_path: Path
) -> tuple[Path, AskedOptions]:
    """A target, and who computes it. Of Qwen 3.5 nothing but the library reads all weights, and
    its states can be taken back by a few tokens only."""
    runtime, _, family = request.param.partition(", ")
    if runtime == "reference":
        return target, ASKED
    pytest.importorskip("llama_cpp")
    path = tmp_path / "hf.gguf"
    if family:
        hybrid_models.write_qwen35(path, context_length=1024)
    else:
        model = tiny.build("llama", num_hidden_layers=2, max_position_embeddings=1024)
        tiny.write_gguf(model, path)
    return path, AskedOptions(runtime=runtime, threads=1, kv_type="f32", flash_attention=False)


@contextmanager
def learning_engine(
    target: Path, asked: AskedOptions = ASKED, is_idle: bool = False
) -> Iterator[tuple[Engine, Learner]]:
    learners: list[Learner] = []

    def start(*given: Any) -> Learner:
        learners.append(start_learning(*given))
        return learners[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(idle_learning, "is_idle", lambda: is_idle)
        with load_asked(str(target), asked, quiet, learning=start) as engine:
            yield engine, learners[0]


def written(learner: Learner) -> None:
    """Returns once all answers so far are."""
    learner._writer.submit(lambda: None).result(PATIENCE_S)


def answers(engine: Engine) -> list[list[int]]:
    """Greedy ones and drawn ones."""
    found = []
    for seed in (None, 1, 2):
        sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
        for prompt in ("tell me", "what is it"):
            result = engine.chat(prompt, max_tokens=40, sampling=sampling)
            found.append([token.id for token in result.tokens])
    return found


@pytest.mark.usefixtures("fixed_policy", "torch")
def test_texts_are_the_same_with_a_head_that_was_learnt(
    place: tuple[Path, AskedOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    target, asked = place
    with load_asked(str(target), asked, quiet) as engine:
        plain = answers(engine)
    with learning_engine(target, asked) as (engine, learner):
        assert answers(engine) == plain
        written(learner)
        Rule(target).fill(learner._folder, 20)
        train_head(learner._folder, told(target, CHEAP), quiet)
        learner._take_head()
        assert answers(engine) == plain
        drafted = engine.last.stats.drafters if engine.last else {}
        assert drafted["medusa"].draft_n > 0
        with engine.fork() as other:
            assert answers(other) == plain
        assert run(["learn", "status", "hf", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["models"][0]["drafts"] is True
        assert not list((Path(os.environ["EDGE_SPEC_CACHE"]) / "heads").glob("head-*"))
        assert run(["learn", "forget"]) == 0
        assert answers(engine) == plain  # forgotten while it is open
        assert engine.last is not None and "medusa" not in engine.last.stats.drafters
        assert answers(engine) == plain
        written(learner)
        assert learner._folder.answers()  # those after the first one are kept again


def test_what_is_kept_are_whole_answers_and_their_states(place: tuple[Path, AskedOptions]) -> None:
    target, asked = place
    with learning_engine(target, asked) as (engine, learner):
        result = engine.chat("tell me", max_tokens=30)
        stopped = engine.chat("what is it", stream=True, max_tokens=30)
        next(stopped)
        stopped.close()  # nobody wanted the rest of it
        engine.chat("tell", max_tokens=3)  # too short
        written(learner)
        folder, config = learner._folder, engine.parts.model.config
        (found,) = folder.examples(folder.answers(), config)
        tokens, start = found.conversation.tokens, found.conversation.start
        assert tokens[start:].tolist() == [token.id for token in result.tokens]
        assert tokens[:start].tolist() == engine.chat_prompt("tell me")
    tables = open_tables(Source(str(target), quiet), "the test reads")
    output = StoredTables(tables).output_rows(None)
    best = (found.features[:, 0].astype(np.float32) @ output.T).argmax(axis=1)
    # Each state is the one in which its token was chosen; float16 may turn a near tie.
    assert (best == tokens[start:]).mean() > 0.9


def test_nothing_is_kept_unless_it_was_asked_for(target: Path) -> None:
    with load_asked(str(target), ASKED, quiet) as engine:
        engine.chat("tell me", max_tokens=30)
    assert kept_folders() == []


def test_of_two_processes_one_learns(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    with learning_engine(target) as (_, first):
        assert "another process" not in caplog.text
        with learning_engine(target) as (engine, second):
            assert "another process learns from hf: this one keeps no answers" in caplog.text
            engine.chat("tell me", max_tokens=30)
            written(second)
            assert not first._folder.answers()
    caplog.clear()
    with learning_engine(target) as (engine, third):
        assert "another process" not in caplog.text
        engine.chat("tell me", max_tokens=30)
        written(third)
        assert third._folder.answers()


def test_a_damaged_head_does_not_draft_and_is_told(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with learning_engine(target) as (_, learner):
        head = learner._folder.head
    head.mkdir()
    (head / "report.json").write_text(json.dumps(REPORT))
    with learning_engine(target) as (engine, learner):
        assert "what was learnt for hf cannot be used" in caplog.text
        assert learner.head() is None
        assert engine.chat("tell me", max_tokens=10).tokens


def test_an_answer_ends_the_process_that_learns(target: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def waits(stop: threading.Event) -> None:
        begun.set()
        assert stop.wait(PATIENCE_S)
        ended.set()

    with learning_engine(target) as (engine, learner):
        process = learner._process
        process._work, process._quiet_s = waits, 0.0
        process._may_begin = lambda: not begun.is_set()
        engine.chat("tell me", max_tokens=3)
        assert begun.wait(PATIENCE_S)
        engine.chat("tell me", max_tokens=3)
        assert ended.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("torch")
def test_it_learns_in_a_process_of_its_own_for_so_long_a_day(target: Path, rule: Rule) -> None:
    """All of it, but for the wait."""
    with learning_engine(target, is_idle=True) as (_, learner):
        rule.fill(learner._folder)
        assert learner._may_begin()
        learner._learn(threading.Event())
        found = learner._folder.report()
        assert found is not None and found.until == 10 and learner._report == found
        assert not learner._may_begin()  # there is nothing new
        rule.fill(learner._folder)
        assert learner._may_begin() and sum(learner._spent_s.values()) > 0
        learner._spent_s[idle_learning._today()] = idle_learning.MOST_S_A_DAY
        assert not learner._may_begin()
        learner._spent_s["1999-12-31"] = learner._spent_s.pop(idle_learning._today())
        assert learner._may_begin()


# What is refused.


def test_pytorch_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_spec.distill.request.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install -e "\.\[distill\]"'):
        require_learnable(AskedOptions(draft="none"))
    monkeypatch.setattr("edge_spec.distill.request.find_spec", lambda name: "there")
    require_learnable(AskedOptions(draft="none"))


def no_states(patched: pytest.MonkeyPatch, target: Path, path: Path) -> tuple[Path, AskedOptions]:
    from edge_spec.runtimes.reference import ReferenceModel

    without = replace(ReferenceModel.capabilities, hidden_states=False)
    patched.setattr(ReferenceModel, "capabilities", without)
    return target, ASKED


def encoder(patched: pytest.MonkeyPatch, target: Path, path: Path) -> tuple[Path, AskedOptions]:
    return t5_models.write(path), ASKED


def lfm2(patched: pytest.MonkeyPatch, target: Path, path: Path) -> tuple[Path, AskedOptions]:
    pytest.importorskip("llama_cpp")
    asked = AskedOptions(runtime="llamacpp", threads=1)
    return family_gguf.write_gguf("lfm2", path.with_suffix(".gguf")), asked


def no_tables(patched: pytest.MonkeyPatch, target: Path, path: Path) -> tuple[Path, AskedOptions]:
    def none(source: Any, who: str) -> None:
        raise UsageError(f"{who} tables of its target", remedy="Name the file.")

    patched.setattr(idle_learning, "open_tables", none)
    return target, ASKED


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (no_states, "which reference does not give"),
        (encoder, "has an encoder, and nothing is learnt"),
        (lfm2, "which llamacpp does not give"),
        (no_tables, "a head that learns here shares tables"),
    ],
)
def test_a_model_that_nothing_can_be_learnt_of_is_refused(
    make: Callable[..., tuple[Path, AskedOptions]],
    told: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, asked = make(monkeypatch, target, tmp_path / "model")
    with (
        pytest.raises((UnsupportedModelError, UsageError), match=told) as caught,
        learning_engine(path, asked),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert kept_folders() == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["chat", "--learn", "--drafter", "suffix"], "--learn trains who drafts"),
        (["serve", "--learn", "--drafter", "none"], "--learn trains who drafts"),
        (["serve", "--learn", "--draft", "smollm2"], "--learn trains who drafts"),
        (["serve", "a.gguf", "b.gguf", "--learn"], "--learn is for one model"),
        (["learn", "forget", "nobody"], "nothing was learnt from answers of nobody"),
        (["learn", "status", "nobody"], "nothing was learnt from answers of nobody"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and told in lines[0]


def test_status_and_forget_say_what_there_is(
    folder: LearntFolder, rule: Rule, capsys: pytest.CaptureFixture[str]
) -> None:
    rule.fill(folder, 4)
    assert run(["learn", "status", "hf"]) == 0
    out = capsys.readouterr().out
    assert "hf: 4 answers, 600 tokens" in out and "no head has been trained yet" in out
    folder.head.mkdir()
    (folder.head / "report.json").write_text(json.dumps(REPORT))
    assert run(["learn", "status", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["models"]
    assert (told["model"], told["answers"], told["drafts"]) == ("hf", 4, True)
    assert told["gain"] == 1.25 and told["bytes"] > 0
    assert run(["learn", "status"]) == 0
    assert "the head drafts: it has learnt from 450 tokens" in capsys.readouterr().out
    assert run(["learn", "forget", "hf", "--json"]) == 0
    freed = json.loads(capsys.readouterr().out)["freed_bytes"]
    assert freed == {folder.path.name: told["bytes"]}
    assert kept_folders() == []
    assert run(["learn", "status"]) == 0
    assert "Nothing is kept" in capsys.readouterr().out
