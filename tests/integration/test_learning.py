"""Learning from answers: a head drafts once it was measured to pay, no text changes by it, and
whatever is interrupted, damaged or forgotten leaves what is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
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
from edge_spec.core.isolated import IsolatedError, Lifeline
from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.engine import Engine
from edge_spec.errors import StorageError, UnsupportedModelError, UsageError
from edge_spec.learning import head_training as head_training_module
from edge_spec.learning import idle_learning as idle_learning_module
from edge_spec.learning.conditions import Conditions
from edge_spec.learning.folder import ForgottenError, LearningFolder, LearningState, kept_folders
from edge_spec.learning.idle_learning import Assignment, IdleLearning
from edge_spec.learning.learner import Learner, LearnerParts, require_learnable, start_learning
from edge_spec.learning.texts import LearntText, as_kept
from edge_spec.learning.trial import Place
from edge_spec.loader import load_asked
from edge_spec.loader.head import StoredTables, open_tables
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source
from fixtures import family_gguf, hybrid_models, t5_models

HIDDEN, VOCAB = 64, 265
PATIENCE_S = 60.0
ASKED = AskedOptions(runtime="reference", threads=1)
# Rows that cost next to nothing, and rows that cost a step each, which no draft token is worth.
CHEAP = Place({1: 0.05, 2: 0.0501, 4: 0.0502, 8: 0.0504, 16: 0.0508})
DEAR = Place({1: 0.05, 2: 0.1, 4: 0.2, 8: 0.4, 16: 0.8})


def quiet(what: str, fraction: float) -> None:
    """Tells nobody."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", num_hidden_layers=2, max_position_embeddings=1024)
    return Path(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


@pytest.fixture
def folder(tmp_path: Path) -> LearningFolder:
    found = LearningFolder(tmp_path / "cache" / "learnt" / "hf-0123")
    found.open()
    return found


class Rule:
    """Texts in which each token has one that follows it, in states that score it highest. None of
    them repeats itself, so suffix lookup finds nothing."""

    def __init__(self, target: Path) -> None:
        tables = open_tables(Source(str(target), quiet), "a rule reads")
        self.config: ModelConfig = tables.config
        self._output = StoredTables(tables).output_rows(None)
        self._order = np.random.default_rng(7).permutation(VOCAB)

    def text(self, start: int, count: int = 150) -> LearntText:
        tokens = self._order[(start + np.arange(count)) % VOCAB]
        rows = self._output[tokens]
        states = 20 * rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return LearntText((int(self._order[start - 1]),), tokens, as_kept(states))


@pytest.fixture
def rule(target: Path) -> Rule:
    return Rule(target)


def anywhere(tmp_path: Path) -> Conditions:
    return Conditions(system=tmp_path / "no system")


@pytest.fixture
def idle_learning(
    folder: LearningFolder, target: Path, tmp_path: Path
) -> Callable[..., IdleLearning]:
    """idle_learning(place): what the process does, here."""

    def make(place: Place = CHEAP, conditions: Conditions | None = None) -> IdleLearning:
        return IdleLearning(
            folder, Assignment(str(target), place), conditions or anywhere(tmp_path)
        )

    return make


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a first head."""
    path = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("EDGE_SPEC_CACHE", str(path))
        found, rule = LearningFolder(path / "learnt" / "hf-0123"), Rule(target)
        found.open()
        for start in range(0, 240, 24):
            found.texts.add(rule.text(start))
        IdleLearning(found, Assignment(str(target), CHEAP), anywhere(path)).run()
    return found.path


def learnt(folder: LearningFolder, trained: Path) -> None:
    """A first head."""
    shutil.copytree(trained, folder.path, dirs_exist_ok=True)


def ask_more(folder: LearningFolder, rule: Rule) -> None:
    for start in (12, 60, 110, 180):
        folder.texts.add(rule.text(start))


def judged(
    folder: LearningFolder,
    trained: Path,
    rule: Rule,
    idle_learning: Callable[..., IdleLearning],
    place: Place,
) -> LearningState:
    learnt(folder, trained)
    ask_more(folder, rule)
    made = idle_learning(place)
    made._judge()
    return folder.state()


def test_a_head_that_pays_on_answers_it_has_not_seen_is_chosen(
    folder: LearningFolder, trained: Path, rule: Rule, idle_learning: Callable[..., IdleLearning]
) -> None:
    learnt(folder, trained)
    state = folder.state()
    assert (state.candidate, state.chosen, state.learnt_until) == ("00000010", None, 10)
    assert not folder.training.exists()
    ask_more(folder, rule)
    made = idle_learning()
    made._judge()
    state = folder.state()
    trial = state.trials[-1]
    assert state.chosen == "00000010" and (trial.first, trial.last) == (10, 13)
    assert trial.gain > 1.2
    assert trial.tokens_a_round["00000010"] > 1.2 > 1.05 > trial.tokens_a_round[""]
    assert state.stats["medusa"]  # where live use begins


def test_a_head_that_does_not_pay_never_drafts(
    folder: LearningFolder, trained: Path, rule: Rule, idle_learning: Callable[..., IdleLearning]
) -> None:
    state = judged(folder, trained, rule, idle_learning, DEAR)
    assert state.trials[-1].gain < 1.02
    assert state.chosen is None and state.candidate is not None


def test_one_that_pays_no_more_stops_drafting(
    folder: LearningFolder, trained: Path, rule: Rule, idle_learning: Callable[..., IdleLearning]
) -> None:
    assert judged(folder, trained, rule, idle_learning, CHEAP).chosen is not None
    ask_more(folder, rule)
    idle_learning(DEAR)._judge()
    assert folder.state().chosen is None


def test_after_it_was_judged_by_them_answers_are_learnt_from(
    folder: LearningFolder, trained: Path, rule: Rule, idle_learning: Callable[..., IdleLearning]
) -> None:
    learnt(folder, trained)
    ask_more(folder, rule)
    idle_learning().run()
    state = folder.state()
    assert (state.candidate, state.learnt_until) == ("00000014", 14)
    assert state.chosen == "00000010"  # the new one was not measured yet
    assert {each.name for each in (folder.path / "heads").iterdir()} == {"00000010", "00000014"}
    assert state.spent_s > 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_all_that_is_kept_is_for_the_user_alone(
    folder: LearningFolder, trained: Path, rule: Rule, idle_learning: Callable[..., IdleLearning]
) -> None:
    learnt(folder, trained)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for path in [*folder.texts.directory.iterdir(), *(folder.path / "heads").rglob("*.*")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_kill_while_it_trains_leaves_the_old_head_whole(
    folder: LearningFolder,
    trained: Path,
    rule: Rule,
    idle_learning: Callable[..., IdleLearning],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = judged(folder, trained, rule, idle_learning, CHEAP)
    monkeypatch.setattr(head_training_module, "KEPT_EVERY_S", -1.0)  # after each step
    steps: list[int] = []

    class KilledError(BaseException):
        """Ends the process at once."""

    def killed(path: Path, training: Any) -> None:
        steps.append(training.step)
        saved(path, training)
        if len(steps) == 5:
            raise KilledError

    saved = head_training_module.save_training
    monkeypatch.setattr(idle_learning_module, "save_training", killed)
    with pytest.raises(KilledError):
        idle_learning()._train()
    state = folder.state()
    assert (state.chosen, state.candidate) == (before.chosen, before.candidate)
    assert idle_learning()._heads(state)  # they can still be opened
    monkeypatch.setattr(idle_learning_module, "save_training", saved)
    monkeypatch.setattr(head_training_module, "KEPT_EVERY_S", 3600.0)
    made = idle_learning()
    assert made._train()  # goes on where it was
    assert folder.state().candidate == "00000014" and steps[-1] == 5


@pytest.mark.parametrize("place", ["Drafter", "save_training"])
def test_a_full_disk_leaves_the_old_head_whole(
    place: str,
    folder: LearningFolder,
    trained: Path,
    rule: Rule,
    idle_learning: Callable[..., IdleLearning],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = judged(folder, trained, rule, idle_learning, CHEAP)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    every_s = {"save_training": -1.0}.get(place, 3600.0)  # after the first step, or never
    monkeypatch.setattr(head_training_module, "KEPT_EVERY_S", every_s)
    monkeypatch.setattr(idle_learning_module, place, full)
    with pytest.raises(OSError, match=r"(?i)no space"):
        idle_learning()._train()
    state = folder.state()
    assert (state.chosen, state.candidate) == (before.chosen, before.candidate)
    assert [each.name for each in (folder.path / "heads").iterdir()] == ["00000010"]


@pytest.mark.parametrize("what", ["state", "head", "another target's head", "version"])
def test_what_cannot_be_used_is_made_again_from_the_texts(
    what: str,
    folder: LearningFolder,
    trained: Path,
    rule: Rule,
    target: Path,
    tiny: ModuleType,
    idle_learning: Callable[..., IdleLearning],
    tmp_path: Path,
) -> None:
    judged(folder, trained, rule, idle_learning, CHEAP)
    if what == "state":
        path = folder.path / "state.json"
        path.write_bytes(path.read_bytes().replace(b"00000010", b"00000011"))
    elif what == "version":
        (folder.path / "state.json").write_text('{"version": 2, "model": "hf"}')
    elif what == "head":
        path = folder.head("00000010") / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
    else:
        other = tiny.build("llama", num_hidden_layers=2, hidden_size=32)
        target = Path(tiny.write_hf(other, tmp_path / "other"))
    made = IdleLearning(folder, Assignment(str(target), CHEAP), anywhere(tmp_path))
    assert made._state == LearningState(1, str(target))
    assert not (folder.path / "heads").exists()


def test_a_training_stops_where_the_machine_is_needed(
    folder: LearningFolder, rule: Rule, idle_learning: Callable[..., IdleLearning], tmp_path: Path
) -> None:
    for start in range(0, 240, 24):
        folder.texts.add(rule.text(start))
    battery = tmp_path / "sys" / "power_supply" / "BAT0"
    battery.mkdir(parents=True)
    (battery / "type").write_text("Battery")
    (battery / "status").write_text("Full")
    made = idle_learning(conditions=Conditions(tmp_path / "sys"))
    ticks = iter(range(10_000))

    def second() -> float:
        """A clock on which each look takes one; the plug is pulled after ten."""
        now = float(next(ticks))
        if now == 10:
            (battery / "status").write_text("Discharging")
        return now

    made._clock, made._told_s = second, 0.0
    made.run()
    assert folder.training.exists() and folder.state().candidate is None
    (battery / "status").write_text("Full")
    idle_learning(conditions=Conditions(tmp_path / "sys")).run()
    assert folder.state().candidate == "00000010"


def test_what_is_forgotten_while_it_is_learnt_from_is_not_written_again(
    folder: LearningFolder, rule: Rule, idle_learning: Callable[..., IdleLearning]
) -> None:
    for start in range(0, 240, 24):
        folder.texts.add(rule.text(start))
    made = idle_learning()
    assert folder.forget() > 0
    with pytest.raises(ForgottenError):
        made._put(LearningState(1, "hf"))
    assert not folder.path.exists()
    folder.open()  # a process that keeps answers begins again
    with pytest.raises(ForgottenError):
        made._put(LearningState(1, "hf"))
    assert not folder.texts.entries()


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
    target: Path, asked: AskedOptions = ASKED, **parts: Any
) -> Iterator[tuple[Engine, Learner]]:
    """Whose machine is never idle, unless it is said."""
    learners: list[Learner] = []

    def start(*given: Any) -> Learner:
        learner = start_learning(*given)
        learner._parts = replace(learner._parts, **({"is_idle": lambda: False} | parts))
        learners.append(learner)
        return learner

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


@pytest.mark.usefixtures("fixed_policy")
def test_texts_are_the_same_with_a_head_that_was_learnt(
    place: tuple[Path, AskedOptions], tmp_path: Path
) -> None:
    target, asked = place
    with load_asked(str(target), asked, quiet) as engine:
        plain = answers(engine)
    with learning_engine(target, asked) as (engine, learner):
        assert answers(engine) == plain
        written(learner)
        folder, rule = learner._folder, Rule(target)
        for start in range(0, 240, 24):
            folder.texts.add(rule.text(start))
        IdleLearning(folder, Assignment(str(target), CHEAP), anywhere(tmp_path)).run()
        with folder.writing(folder.open()):
            state = folder.state()
            folder.put_state(replace(state, chosen=state.candidate))
        learner._take_chosen()
        assert answers(engine) == plain
        drafted = engine.last.stats.drafters if engine.last else {}
        assert drafted["medusa"].draft_n > 0
        with engine.fork() as other:
            assert answers(other) == plain
        assert main_status()["drafts"] is True
        assert run(["learn", "forget"]) == 0
        assert answers(engine) == plain  # forgotten while it is open
        assert engine.last is not None and "medusa" not in engine.last.stats.drafters


def main_status() -> dict[str, Any]:
    from edge_spec.learning.learning_status import learnt_of

    (found,) = learnt_of("hf")
    return found.document()


def test_what_is_kept_are_whole_answers_and_their_states(
    place: tuple[Path, AskedOptions],
) -> None:
    target, asked = place
    with learning_engine(target, asked) as (engine, learner):
        result = engine.chat("tell me", max_tokens=30)
        stopped = engine.chat("what is it", stream=True, max_tokens=30)
        next(stopped)
        stopped.close()  # nobody wanted the rest of it
        engine.chat("tell", max_tokens=3)  # too short
        written(learner)
        texts = list(
            learner._folder.texts.read(learner._folder.texts.entries(), engine.parts.model.config)
        )
        assert len(texts) == 1
        assert texts[0].tokens.tolist() == [token.id for token in result.tokens]
        assert list(texts[0].prompt) == engine.chat_prompt("tell me")
    tables = open_tables(Source(str(target), quiet), "the test reads")
    output = StoredTables(tables).output_rows(None)
    best = (texts[0].states.astype(np.float32) @ output.T).argmax(axis=1)
    # Each state is the one in which its token was chosen; float16 may turn a near tie.
    assert (best == texts[0].tokens).mean() > 0.9


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
            assert not first._folder.texts.entries()
    caplog.clear()
    with learning_engine(target) as (engine, third):
        assert "another process" not in caplog.text
        engine.chat("tell me", max_tokens=30)
        written(third)
        assert third._folder.texts.entries()


def test_answers_that_cannot_be_kept_end_the_learning_and_nothing_else(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Any, text: LearntText) -> None:
        raise StorageError("no space left on / for a text", remedy="Free some.", errno=errno.ENOSPC)

    monkeypatch.setattr("edge_spec.learning.texts.TextFiles.add", full)
    with learning_engine(target) as (engine, learner):
        for _ in range(2):
            assert engine.chat("tell me", max_tokens=30).tokens
            written(learner)
    assert caplog.text.count("nothing more is learnt from answers of hf: no space left") == 1


def test_a_damaged_head_does_not_draft_and_is_told(
    target: Path, rule: Rule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with learning_engine(target) as (_, learner):
        folder = learner._folder
    with folder.writing(folder.open()):
        folder.put_state(LearningState(1, "hf", candidate="0", chosen="0"))
    with learning_engine(target) as (engine, learner):
        assert "what was learnt for hf cannot be used" in caplog.text
        assert learner.head() is None
        assert engine.chat("tell me", max_tokens=10).tokens


def test_an_answer_ends_the_process_that_learns(folder: LearningFolder) -> None:
    begun, ended = threading.Event(), threading.Event()

    def waits(lifeline: Lifeline) -> None:
        import sys

        with lifeline.start([sys.executable, "-c", "import time; time.sleep(600)"], {}) as process:
            begun.set()
            process.wait(PATIENCE_S)
        ended.set()

    learner = Learner(
        folder, LearnerParts("hf", lambda: Assignment("hf", CHEAP), lambda path: None, quiet_s=0.0)
    )  # type: ignore[arg-type,return-value]
    learner._process._work = waits
    learner._process._may_begin = lambda: not begun.is_set()
    learner.start()
    learner.pause()
    learner.resume()
    assert begun.wait(PATIENCE_S)
    learner.pause()
    assert ended.wait(PATIENCE_S)
    learner.resume()
    learner.close()


def test_it_learns_in_a_process_of_its_own(target: Path, rule: Rule, tmp_path: Path) -> None:
    """All of it, but for the wait."""
    conditions = anywhere(tmp_path)
    with learning_engine(target, is_idle=lambda: True, conditions=conditions) as (_, learner):
        for start in range(0, 240, 24):
            learner._folder.texts.add(rule.text(start))
        assert learner._may_begin()
        with Lifeline() as lifeline:
            learner._learn(lifeline)
        assert learner._folder.state().candidate == "00000010"
        assert not learner._may_begin()  # there is nothing new


def test_a_process_that_fails_is_told_in_one_line(
    folder: LearningFolder, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Assignment("/no/such/model.gguf", CHEAP)
    learner = Learner(folder, LearnerParts("hf", lambda: asked, lambda path: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(IsolatedError, match="no such file"), Lifeline() as lifeline:
        learner._learn(lifeline)
    assert caplog.text.count("nothing more is learnt from answers of hf: ") == 1
    assert not learner._may_begin()
    learner.close()


# What is refused.


@pytest.mark.parametrize(
    "asked", [{"drafter": "suffix"}, {"drafter": "none"}, {"draft": "smollm2"}]
)
def test_other_drafters_are_refused(asked: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="--learn trains who drafts"):
        require_learnable(AskedOptions(**asked))  # type: ignore[arg-type]
    require_learnable(AskedOptions(draft="none"))


def test_a_runtime_without_hidden_states_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_spec.runtimes.reference import ReferenceModel

    without = replace(ReferenceModel.capabilities, hidden_states=False)
    monkeypatch.setattr(ReferenceModel, "capabilities", without)
    with (
        pytest.raises(UnsupportedModelError, match="which reference does not give"),
        learning_engine(target),
    ):
        pass
    assert kept_folders() == []


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedModelError, match="has an encoder, and nothing is learnt"),
        learning_engine(t5_models.write(tmp_path / "t5")),
    ):
        pass
    assert kept_folders() == []


def test_a_model_whose_final_states_llamacpp_does_not_give_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = family_gguf.write_gguf("lfm2", tmp_path / "lfm2.gguf")
    with (
        pytest.raises(UnsupportedModelError, match="which llamacpp does not give") as caught,
        learning_engine(path, AskedOptions(runtime="llamacpp", threads=1)),
    ):
        pass
    assert "--learn" in caught.value.remedy and "\n" not in str(caught.value)
    assert kept_folders() == []


def test_a_target_without_its_tables_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(source: Any, who: str) -> None:
        raise UsageError(f"{who} tables of its target", remedy="Name the file.")

    monkeypatch.setattr("edge_spec.learning.learner.open_tables", none)
    with (
        pytest.raises(UsageError, match="a head that learns here shares tables"),
        learning_engine(target),
    ):
        pass
    assert kept_folders() == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["chat", "--learn", "--drafter", "suffix"], "--learn trains who drafts"),
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
    folder: LearningFolder,
    trained: Path,
    rule: Rule,
    idle_learning: Callable[..., IdleLearning],
    capsys: pytest.CaptureFixture[str],
) -> None:
    judged(folder, trained, rule, idle_learning, CHEAP)
    assert run(["learn", "status", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["models"]
    assert (told["model"], told["answers"], told["drafts"]) == ("hf", 14, True)
    assert told["gain"] > 1.2 and told["bytes"] > 0
    assert run(["learn", "status", "hf"]) == 0
    assert "hf: 14 answers, 2100 tokens" in (out := capsys.readouterr().out)
    assert "the head drafts: on the last answers" in out
    assert run(["learn", "forget", "hf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"]["hf-0123"] == told["bytes"]
    assert not folder.path.exists()
    assert run(["learn", "status"]) == 0
    assert "Nothing is kept" in capsys.readouterr().out


def test_a_damaged_store_is_told_by_status(
    folder: LearningFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / "state.json").write_text("{}")
    assert run(["learn", "status"]) == 0
    assert "damaged and is made again" in capsys.readouterr().out
