"""What a drafter is trained on, without the library that trains it: answers and features."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.cli.main import run
from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.bench.loops import in_loops
from edge_spec.distill.answers import CONVERSATIONS, write_answers
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.draft_cost import draft_token_s
from edge_spec.distill.features import FeatureRequest, read_features, require_features
from edge_spec.distill.prompts import GivenPrompts, OwnPrompts, require_own_prompts
from edge_spec.engine.engine import Engine
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference.session import ReferenceSession
from fixtures import heads

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


@pytest.fixture(params=["reference", "ort"])
def engine(request: pytest.FixtureRequest, target: Path, bundle: Path) -> Iterator[Engine]:
    path = bundle if request.param == "ort" else target
    with edge_spec.load(str(path), runtime=request.param, threads=1) as opened:
        yield opened


def _answers(engine: Engine, folder: Path, num_tokens: int = 200) -> list[Conversation]:
    folder.mkdir(exist_ok=True)
    return write_answers(engine, GivenPrompts(PROMPTS, 16), folder, num_tokens, quiet)


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
    stored = (tmp_path / f"features-{LAYERS}-a.bin").stat().st_size
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
    found = [tasks.conversation(engine, task, Event()) for task in range(12)]
    again = [tasks.conversation(engine, task, Event()) for task in range(12)]
    for one, other in zip(found, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or one.tokens.tolist() == other.tokens.tolist()


def test_a_draft_token_is_timed_by_the_drafter_itself(target: Path, tmp_path: Path) -> None:
    source = open_checkpoint(target)
    eagle = heads.draw(LAYERS, source.config.vocab_size, "safeailab").write(tmp_path / "eagle")
    states = np.zeros((4, 64), np.float32)
    medusa = heads.write_medusa(tmp_path / "medusa", states, np.arange(4), source.config.vocab_size)
    for path in (eagle, medusa):
        assert 0 < draft_token_s(path, source.config, source) < 1


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


@pytest.mark.usefixtures("trains")
def test_what_is_there_is_not_replaced(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert run(["distill", str(target), "--out", str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_without_pytorch_the_command_that_installs_it_is_told(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("edge_spec.distill.request.find_spec", lambda name: None)
    assert run(["distill", str(target), "--out", str(tmp_path / "out")]) == 1
    assert 'pip install "edge-spec[distill]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["distill", "--help"]) == 0
    assert "--max-cache" in capsys.readouterr().out
