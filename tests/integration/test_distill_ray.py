"""Answers of a Ray cluster of two machines, one of which is killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import edge_spec
from edge_spec.cli.main import run
from edge_spec.distill.answers import write_answers
from edge_spec.distill.cluster import CONVERSATIONS, Cluster, ThisMachine
from edge_spec.distill.prompts import GivenPrompts
from edge_spec.errors import DeviceError
from edge_spec.models.asked_options import AskedOptions

ray = pytest.importorskip("ray")
# Ray's own: sockets and files of processes that are killed, and what it deprecates in itself.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS = 3
ASKED = AskedOptions(runtime="reference", threads=1)
TASKS = GivenPrompts(tuple(f"tell me {index}" for index in range(24)), 24)
NUM_TOKENS = 900


def quiet(what: str, fraction: float) -> None:
    """Tells nobody."""


@pytest.fixture
def target(tiny: ModuleType, tmp_path: Path) -> str:
    return str(tiny.write_hf(tiny.build("llama", num_hidden_layers=LAYERS), tmp_path / "hf"))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster on this machine, and the second of its two."""
    from ray.cluster_utils import Cluster as LocalCluster

    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = LocalCluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def _learnt_from(answers: Any) -> bytes:
    return b"".join(each.tokens.tobytes() for each in answers)


def test_a_machine_that_is_killed_changes_no_byte(
    target: str, machines: Any, tmp_path: Path
) -> None:
    cluster, second = machines
    for name in ("alone", "cluster"):
        (tmp_path / name).mkdir()
    with edge_spec.load(target, runtime="reference", threads=1) as engine:
        machine = ThisMachine(engine, TASKS)
        alone = write_answers(machine, TASKS, tmp_path / "alone", NUM_TOKENS, quiet)
    killed: list[str] = []

    def progress(what: str, fraction: float) -> None:
        """Kills the second machine in the midst of the answers."""
        if 0.2 < fraction < 1 and not killed:
            killed.append(what)
            cluster.remove_node(second, allow_graceful=False)

    with Cluster(cluster.address, target, ASKED, TASKS) as found:
        with found.writers() as writers:
            assert len(writers) == 2 * CONVERSATIONS
        answers = write_answers(found, TASKS, tmp_path / "cluster", NUM_TOKENS, progress)
        assert killed
        with found.writers() as writers:
            assert len(writers) == CONVERSATIONS
    assert _learnt_from(answers) == _learnt_from(alone)


def test_what_a_machine_refuses_is_one_line(target: str, machines: Any) -> None:
    cluster, _ = machines
    asked = replace(ASKED, runtime="none-such")
    with pytest.raises(DeviceError, match="none-such") as caught:
        Cluster(cluster.address, target, asked, TASKS).__enter__()
    assert "\n" not in str(caught.value)


def test_the_same_command_makes_the_same_drafter(
    target: str, machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    # Measured ones differ from run to run.
    passes_s = {1: 1.0, 2: 1.1, 4: 1.3}
    monkeypatch.setattr("edge_spec.distill.run.median_seconds", lambda passes: passes_s)
    monkeypatch.setattr("edge_spec.distill.training.time_untrained", lambda *given: 0.1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TASKS.prompts))
    options = ["--prompts", str(prompts), "--tokens", "300", "--max-tokens"]
    options += ["16", "--epochs", "1", "--runtime", "reference"]
    options += ["--threads", "1"]
    cluster, _ = machines
    made = []
    for name, more in (("alone", []), ("cluster", ["--ray", cluster.address])):
        monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / f"cache-{name}"))
        out = tmp_path / name
        assert run(["distill", target, "--out", str(out), *options, *more]) == 0
        made.append((out / "model.safetensors").read_bytes())
    assert made[0] == made[1]
