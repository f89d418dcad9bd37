"""What a drafter is trained on, without the library that trains it: answers and features."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, get_ident
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.cli.main import run
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Session
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.bench.figures import in_loops
from edge_spec.distill.answers import (
    CONVERSATIONS,
    WriterLostError,
    local_writers,
    write_answers,
)
from edge_spec.distill.cluster import content_of
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.draft_runs import draft_token_s
from edge_spec.distill.features import (
    FeatureRequest,
    feature_rows,
    read_features,
    require_features,
)
from edge_spec.distill.prompts import GivenPrompts, OwnPrompts, require_own_prompts
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceError, UnsupportedModelError, UsageError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference.session import ReferenceSession
from fixtures import families, heads, hybrid_models

LAYERS = 7
PROMPTS = tuple(f"tell me {index}" for index in range(12))


def quiet(what: str, fraction: float) -> None:
    """Tells nobody."""


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", num_hidden_layers=LAYERS)
    return Path(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "onnx"
    options = ExportOptions("fp32", 32, check=False)
    OnnxExporter().export(open_checkpoint(target), path, options, quiet)
    return path


@pytest.fixture(params=[pytest.param("reference", marks=pytest.mark.slow), "ort"])
def engine(request: pytest.FixtureRequest, target: Path, bundle: Path) -> Iterator[Engine]:
    path = bundle if request.param == "ort" else target
    with edge_spec.load(str(path), runtime=request.param, threads=1) as opened:
        yield opened


def _answers(engine: Engine, folder: Path, num_tokens: int = 200) -> list[Conversation]:
    folder.mkdir(exist_ok=True)
    tasks = GivenPrompts(PROMPTS, 16)
    writers = partial(local_writers, engine, tasks)
    return write_answers(writers, tasks, folder, num_tokens, quiet)


def test_answers_are_plain_greedy_decoding(engine: Engine, tmp_path: Path) -> None:
    found = _answers(engine, tmp_path)
    assert sum(each.num_answered for each in found) >= 180
    for each in found[: len(PROMPTS)]:  # the others are drawn
        with engine.without_drafting():
            plain = engine.generate(each.tokens[: each.start].tolist(), max_tokens=16)
        written = [token.id for token in plain.tokens]
        assert written[: each.num_answered] == each.tokens[each.start :].tolist()
        assert each.num_answered == len(written) or in_loops(written)[each.num_answered]
    assert sum(each.is_held_out for each in found) == 2  # of 12 prompts; later rounds have none


def test_answers_are_gone_on_with_where_they_stopped(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _answers(engine, tmp_path / "whole")
    done: list[int] = []
    asked = GivenPrompts.conversation

    def interrupted(
        self: GivenPrompts, engine: Engine, task: int, stop: Event
    ) -> Conversation | None:
        if len(done) == CONVERSATIONS + 2:
            raise KeyboardInterrupt
        done.append(task)
        return asked(self, engine, task, stop)

    monkeypatch.setattr(GivenPrompts, "conversation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _answers(engine, tmp_path / "cut")
    again: list[int] = []

    def going_on(self: GivenPrompts, engine: Engine, task: int, stop: Event) -> Any:
        again.append(task)
        return asked(self, engine, task, stop)

    monkeypatch.setattr(GivenPrompts, "conversation", going_on)
    found = _answers(engine, tmp_path / "cut")
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in whole]
    # What was written is not asked again, and held-out prompts are asked once: only those that were
    # being written when it stopped may be in both.
    assert len(set(done) & set(again)) < CONVERSATIONS


def test_features_are_those_of_decoding(engine: Engine, tmp_path: Path) -> None:
    answers = _answers(engine, tmp_path, 60)
    request = FeatureRequest((2, LAYERS), True, 10**9)
    found = read_features(engine.parts.model, answers, request, tmp_path, quiet)
    each = found[1]
    tokens = each.conversation.tokens.tolist()
    session = engine.parts.model.open_session()
    session.collect_features(request.layers, lambda position, rows: None)  # type: ignore[attr-defined]
    session.prefill(tokens[: each.first])
    out = session.forward(TokenTree.chain(tokens[each.first], tokens[each.first + 1 : -1]))
    assert out.features is not None
    # Half precision keeps 11 bits; passes of other widths round otherwise in float32.
    np.testing.assert_allclose(each.features, out.features, rtol=2e-3, atol=2e-3)
    assert each.anchors[0] == 0 and len(each.features) == each.conversation.num_answered
    session.close()


def test_a_prompt_is_read_once_for_all_its_answers(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, *_ = _answers(engine, tmp_path, 100)
    shorter = Conversation(one.tokens[:-2], one.start, False)
    single = Conversation(one.tokens[: one.start + 1], one.start, False)
    request, model = FeatureRequest((2, LAYERS), False, 10**9), engine.parts.model
    read: list[int] = []
    reader = get_ident()
    with closing(model.open_session()) as session:
        kind = type(session)
    prefill = kind.prefill

    def counted(session: Session, tokens: Sequence[int]) -> None:
        if get_ident() == reader:  # another thread may still compare passes that are shared
            read.append(len(tokens))
        prefill(session, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "prefill", counted)
        found = read_features(model, [one, other, shorter, single], request, tmp_path, quiet)
    assert [each.conversation for each in found] == [one, shorter, single, other]
    of_further = len(shorter.tokens) - 1 - shorter.start
    assert sum(read) == len(one.tokens) - 1 + of_further + len(other.tokens) - 1
    for each in found:
        (alone,) = feature_rows(model, [each.conversation], request)
        np.testing.assert_array_equal(each.features, alone)


def test_features_are_gone_on_with_where_they_stopped(engine: Engine, tmp_path: Path) -> None:
    answers = _answers(engine, tmp_path, 100)
    request, model = FeatureRequest((LAYERS,), False, 10**9), engine.parts.model

    def stop(what: str, fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_features(model, answers, request, tmp_path, stop)
    begun: list[float] = []
    found = read_features(model, answers, request, tmp_path, lambda what, at: begun.append(at))
    assert begun[0] > 0.4  # what was read is not read again
    (tmp_path / "other").mkdir()
    whole = read_features(model, answers, request, tmp_path / "other", quiet)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(one.features, other.features)


def test_features_keep_to_their_bound(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = _answers(engine, tmp_path)
    answers.sort(key=lambda each: not each.is_held_out)
    bound = 20_000  # bytes; each conversation has some 16 rows of 64 numbers of 2 bytes
    request = FeatureRequest((LAYERS,), True, bound)
    found = read_features(engine.parts.model, answers, request, tmp_path, quiet)
    (stored,) = (each.stat().st_size for each in tmp_path.glob("features-*.bin"))
    assert 0.8 * bound < stored <= bound
    assert 1 < len(found) < len(answers)
    assert "--max-cache has room" in caplog.text
    tight = FeatureRequest((LAYERS,), True, 1000)
    with pytest.raises(UsageError, match="too few to train on"):
        read_features(engine.parts.model, answers, tight, tmp_path, quiet)


def test_a_target_that_gives_no_features_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ReferenceSession, "collect_features")
    with (
        edge_spec.load(str(target), runtime="reference") as engine,
        pytest.raises(UnsupportedModelError, match="which this runtime does not give"),
    ):
        require_features(engine.parts.model, engine.name)


def test_a_target_asks_itself_the_same_for_one_seed(engine: Engine, tmp_path: Path) -> None:
    require_own_prompts(engine)
    tasks = OwnPrompts(8, seed=3)
    found = [tasks.conversation(engine, task, Event()) for task in range(4)]
    again = [tasks.conversation(engine, task, Event()) for task in range(4)]
    for one, other in zip(found, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or one.tokens.tolist() == other.tokens.tolist()


def test_a_draft_token_is_timed_by_the_drafter_itself(target: Path, tmp_path: Path) -> None:
    source = open_checkpoint(target)
    eagle = heads.draw(LAYERS, source.config.vocab_size, "safeailab").write(tmp_path / "eagle")
    states = np.zeros((4, 64), np.float32)
    medusa = heads.write_medusa(tmp_path / "medusa", states, np.arange(4), source.config.vocab_size)
    for path in (eagle, medusa):
        assert draft_token_s(path, source.config, source) > 0


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch were installed: what is refused is refused before it is needed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "edge_spec.distill.request.find_spec", lambda name: found("json") or found(name)
    )


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kind", "dflash"], "there is no drafter of the kind dflash"),
        (["--layers", "2"], "--layers is for --kind draft"),
        (["--kind", "draft", "--layers", "7"], "not smaller than its target, which has 7"),
        (["--kind", "draft", "--layers", "0"], "a draft of 0 layers"),
        (["--ray", "somewhere"], "--ray somewhere is no address"),
        (["--ray", "ray://host:1"], "--ray ray://host:1 is no address"),
        (["--prompts", "EMPTY"], "has no prompts"),
        (["--prompts", "BINARY"], "cannot read prompts from"),
        (["--domain", "EMPTY"], "there is no UTF-8 text"),
        (["--domain", "BINARY"], "there is no UTF-8 text"),
        (["--domain", "none"], "no such file or directory"),
        (["--prompts", "EMPTY", "--domain", "EMPTY"], "both say what is asked"),
        (["--positions", "9"], "positions is 9"),
        (["--tokens", "0"], "tokens is 0"),
        (["--max-cache", "0"], "max-cache is 0"),
        (["--drafter", "suffix"], "the drafter is what is trained"),
        (["--out", "EMPTY"], "EMPTY.txt exists already"),
    ],
)
def test_bad_usage_is_one_line(
    options: list[str],
    told: str,
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"EMPTY": b"", "BINARY": b"\xff\x00\xfe"}
    for name, content in files.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    given = [str(tmp_path / f"{each}.txt") if each in files else each for each in options]
    out = tmp_path / "out"
    assert run(["distill", str(target), "--out", str(out), *given]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (["torch"], 'pip install "edge-spec[distill]"'),
        (["ray"], 'pip install "edge-spec[ray]"'),
        ([], "nobody answers at 127.0.0.1:"),
    ],
)
def test_without_a_library_or_a_cluster_one_line_says_what_to_do(
    missing: list[str],
    told: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "edge_spec.distill.request.find_spec", lambda name: None if name in missing else "there"
    )
    out = tmp_path / "out"
    with socket.socket() as taken:  # bound and not listening: nobody else answers there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(["distill", str(target), "--out", str(out), "--ray", address]) == 1
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize("kind", ["eagle3", "draft"])
@pytest.mark.parametrize(
    ("write", "told"),
    [
        (partial(families.write_hf, "gemma2"), "of another form|are too few"),
        (hybrid_models.write_qwen35, "are read by llama.cpp alone.*--kind medusa"),
    ],
    ids=["gemma2", "qwen35"],
)
def test_a_target_of_which_a_kind_cannot_be_made_is_refused_at_once(
    kind: str,
    write: Callable[[Path], Path],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    path, out = write(tmp_path / "target.gguf"), tmp_path / "out"
    assert run(["distill", str(path), "--out", str(out), "--kind", kind]) == 1
    error = capsys.readouterr().err
    assert re.search(told, error) and error.count("\n") == 1
    assert not out.exists() and not (tmp_path / "cache" / "distill").exists()


def test_a_file_is_told_from_another_one(target: Path, tmp_path: Path) -> None:
    """Machines of a cluster compare what they have open by it."""
    copies = [shutil.copytree(target, tmp_path / name / "hf") for name in ("one", "two")]
    assert content_of(str(copies[0])) == content_of(str(copies[1])) == content_of(str(target))
    config = copies[1] / "config.json"
    config.write_text(config.read_text() + " ")
    assert content_of(str(copies[1])) != content_of(str(target))


class _Gone:
    """A writer whose machine is lost in its first task."""

    def __call__(self, task: int, stop: Event) -> None:
        raise WriterLostError


def test_a_lost_writer_leaves_its_task_to_the_others(engine: Engine, tmp_path: Path) -> None:
    tasks = GivenPrompts(PROMPTS, 16)

    @contextmanager
    def writers() -> Iterator[list[Any]]:
        yield [_Gone(), partial(tasks.conversation, engine)]

    (tmp_path / "lost").mkdir()
    found = write_answers(writers, tasks, tmp_path / "lost", 200, quiet)
    whole = _answers(engine, tmp_path / "whole")
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in whole]


def test_a_writer_that_is_lost_beside_enough_answers_changes_nothing(tmp_path: Path) -> None:
    """The fifth task is lost while four are enough."""
    begun = Event()

    def write(task: int, stop: Event) -> Conversation:
        if task == 4:
            begun.set()
            while (tmp_path / "answers.jsonl").read_bytes().count(b"\n") < 4:
                time.sleep(0.01)
            raise WriterLostError
        if task == 3:
            assert begun.wait(60)
        return Conversation(np.arange(6, dtype=np.int32), 2, task == 1)

    @contextmanager
    def writers() -> Iterator[list[Any]]:
        yield [write, write]

    tasks = OwnPrompts(16)
    assert len(write_answers(writers, tasks, tmp_path, 4 * 4, quiet)) == 4


def test_without_any_writer_left_it_ends_in_one_line(tmp_path: Path) -> None:
    @contextmanager
    def writers() -> Iterator[list[Any]]:
        yield [_Gone(), _Gone()]

    with pytest.raises(DeviceError, match="all machines that wrote answers are gone"):
        write_answers(writers, GivenPrompts(PROMPTS, 16), tmp_path, 200, quiet)
