"""What a drafter is trained on, without the library that trains it: answers and features."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.cli.main import run
from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.bench.report import in_loops
from edge_spec.distill.answers import write_answers
from edge_spec.distill.cluster import Cluster, MachineLostError, ThisMachine
from edge_spec.distill.features import Example, FeatureRequest, read_features, require_features
from edge_spec.distill.prompts import Conversation, GivenPrompts
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceError, UnsupportedModelError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.asked_options import AskedOptions
from edge_spec.runtimes.reference.model import ReferenceSession
from fixtures import families, hybrid_models

LAYERS, HIDDEN_SIZE = 7, 64
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
    options = ExportOptions("fp32", check=False)
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
    return write_answers(ThisMachine(engine, tasks), tasks, folder, num_tokens, quiet)


def _features(
    engine: Engine, answers: list[Conversation], request: FeatureRequest, folder: Path
) -> list[Example]:
    return read_features(engine.parts.model, answers, request, folder, quiet)


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


def test_features_are_those_of_decoding(engine: Engine, tmp_path: Path) -> None:
    answers = _answers(engine, tmp_path, 60)
    request = FeatureRequest((2, LAYERS), True)
    found = _features(engine, answers, request, tmp_path)
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


def test_a_target_that_gives_no_features_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ReferenceSession, "collect_features")
    with (
        edge_spec.load(str(target), runtime="reference") as engine,
        pytest.raises(UnsupportedModelError, match="which this runtime does not give"),
    ):
        require_features(engine.parts.model, engine.name)


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
        (["--kind", "draft"], "there is no drafter of the kind draft"),
        (["--ray", "somewhere"], "--ray somewhere is no address"),
        (["--ray", "ray://host:1"], "--ray ray://host:1 is no address"),
        (["--ray", "host:\u0663\u00b2"], "is no address"),
        (["--prompts", "EMPTY"], "has no prompts"),
        (["--prompts", "BINARY"], "cannot read prompts from"),
        (["--positions", "9"], "Invalid value for '--positions'"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--drafter", "suffix"], "the drafter is what is trained"),
        (["--out", "EMPTY"], "EMPTY.txt exists already"),
        (["--out", "/dev/null/folder/head"], "cannot write into /dev/null/folder"),
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
        (["torch"], 'pip install -e ".[distill]"'),
        (["onnxruntime"], 'pip install -e ".[cpu,distill]"'),
        (["ray"], 'pip install -e ".[ray]"'),
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
@pytest.mark.parametrize(
    ("write", "told"),
    [
        (partial(families.write_hf, "gemma2"), "of another form|are too few"),
        (hybrid_models.write_qwen35, "are read by llama.cpp alone.*--kind medusa"),
    ],
    ids=["gemma2", "qwen35"],
)
def test_a_target_of_which_a_kind_cannot_be_made_is_refused_at_once(
    write: Callable[[Path], Path],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    path, out = write(tmp_path / "target.gguf"), tmp_path / "out"
    assert run(["distill", str(path), "--out", str(out), "--kind", "eagle3"]) == 1
    error = capsys.readouterr().err
    assert re.search(told, error) and error.count("\n") == 1
    assert not out.exists() and not (tmp_path / "cache" / "distill").exists()


class Machines(Cluster):
    """A cluster without Ray, of machines that are lost in their first task or do it here."""

    def __init__(self, here: ThisMachine | None, *machines: str) -> None:
        super().__init__("", "", AskedOptions(), GivenPrompts(PROMPTS, 16))
        self.here, self.lock = here, Lock()
        self._machines = [SimpleNamespace(name=name, run=self) for name in machines]

    def remote(self, work: str, *given: Any) -> tuple[Any, ...]:
        return work, *given

    def _wait(self, machine: Any, task: Any, stop: Event, where: str = "") -> Any:
        if machine.name == "lost" or self.here is None:
            with suppress(ValueError):
                self._machines.remove(machine)
            raise MachineLostError
        _, number = task
        with self.lock:
            return self.here.tasks.conversation(self.here.engine, number, stop)


def test_a_lost_machine_leaves_its_tasks_to_the_others(engine: Engine, tmp_path: Path) -> None:
    tasks = GivenPrompts(PROMPTS, 16)
    here = ThisMachine(engine, tasks)
    (tmp_path / "lost").mkdir()
    written = write_answers(Machines(here, "lost", "here"), tasks, tmp_path / "lost", 200, quiet)
    whole = _answers(engine, tmp_path / "whole")
    assert [each.tokens.tolist() for each in written] == [each.tokens.tolist() for each in whole]


def test_without_any_machine_left_it_ends_in_one_line(tmp_path: Path) -> None:
    machines = Machines(None, "lost", "lost")
    with pytest.raises(DeviceError, match="all machines of the cluster are gone"):
        write_answers(machines, machines.tasks, tmp_path, 200, quiet)
