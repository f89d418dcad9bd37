"""A drafter from a package of its own has all rights of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.core.model import Capabilities
from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.cost import RowCosts
from fixtures.fault_matrix import check_faults

ENTRY_POINTS = """
[edge_spec.drafters]
theirs = their_drafters:Theirs
their-model = their_drafters:make_costly
their-draft = their_drafters:make_paired
their-states = their_drafters:make_reading
their-notes = their_drafters:make_learned
their-samples = their_drafters:make_sampling
plain = their_drafters:make_plain
broken = no_such_package:make
"""
PACKAGE = '''
import numpy as np

from edge_spec.core.tree import TokenTree
from edge_spec.drafters.factory import declares
from edge_spec.drafters.protocol import Cost, Drafter, DrafterTraits

made = []


class Theirs(Drafter):
    """Proposes the last two tokens again, and tells what it was asked."""

    name = "theirs"
    traits = DrafterTraits(options=frozenset({"lookahead"}))

    def __init__(self, context):
        self.calls, self.sampler, self.session, self.rights = [], None, None, 0.0
        self.text = []
        made.append(self)

    def attach(self, model, session):
        self.calls.append("attach")
        self.session = session

    def prepare(self, prompt):
        self.calls.append("prepare")

    def begin(self, prompt, sampler):
        self.calls.append("begin")
        self.sampler = sampler
        self.text = list(prompt)

    def propose(self, pending, budget):
        self.calls.append("propose")
        count = min(2, budget.num_draft_tokens)
        ahead = [*self.text[-2:], *self.text[-2:]][:count]
        return TokenTree.chain(pending, ahead, [0.9] * len(ahead), self.name)

    def observe(self, tree, out, verdict):
        self.calls.append("observe")
        self.text += verdict.tokens
        self.rights += verdict.num_accepted

    def state(self, learnt_only=False):
        if learnt_only:
            return {"rights": np.array([self.rights])}
        return {"text": np.array(self.text, np.int32)}

    def load(self, state, learnt_only=False):
        if learnt_only:
            [self.rights] = state["rights"].tolist()
        else:
            self.text = state["text"].tolist()

    def close(self):
        self.calls.append("close")


def named(name, context):
    drafter = Theirs(context)
    drafter.name = name
    return drafter


@declares(DrafterTraits(cost=Cost.PASS, target_session=True))
def make_costly(context):
    return named("their-model", context)


@declares(DrafterTraits(cost=Cost.PASS, draft_model=True))
def make_paired(context):
    return named("their-draft", context)


@declares(DrafterTraits(hidden_states=True))
def make_reading(context):
    return named("their-states", context)


@declares(DrafterTraits(corpora=True, auto=True))
def make_learned(context):
    return named("their-notes", context)


@declares(DrafterTraits(samples=True))
def make_sampling(context):
    return named("their-samples", context)


class Plain:
    """As drafters were before there was a class to inherit from."""

    name = "plain"

    def propose(self, pending, budget):
        return TokenTree.chain(pending)


def make_plain(context):
    return Plain()
'''
VOCAB = 260
SETTING = DrafterContext(VOCAB)
CAPABILITIES = Capabilities(64, trees=True, rollback=True, hidden_states=False)
PROMPT = list(b"abababab")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Installed as pip would: a module and what is known of its distribution."""
    (tmp_path / "their_drafters.py").write_text(PACKAGE, encoding="utf-8")
    info = tmp_path / "their_drafters-1.0.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: their-drafters\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import their_drafters  # type: ignore[import-not-found]

    yield their_drafters
    del sys.modules["their_drafters"]


def with_costs(**more: Any) -> SpeculationFactory:
    costs = RowCosts({1: 0.01, 2: 0.011, 4: 0.012, 8: 0.013})
    invariance = BatchInvariance(0.0, (), branch_invariant=True)
    return SpeculationFactory(SETTING, CAPABILITIES, invariance, costs=lambda: costs, **more)


@pytest.fixture
def engine(
    package: ModuleType, make_engine: Any, remembers_all: Any
) -> Iterator[Callable[[str], Engine]]:
    """One that drafts by names and asks every drafter, whether or not that pays."""
    opened = []

    def make(names: str) -> Engine:
        opened.append(make_engine(remembers_all()))
        opened[-1].set_drafter(names)
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def tokens(engine: Engine, prompt: list[int] = PROMPT, count: int = 16) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=count).tokens]


def test_it_is_listed_where_there_is_what_it_needs(engine: Callable[[str], Engine]) -> None:
    """One whose package lacks a library is not, and keeps nobody from the others."""
    listed = engine("none").drafters
    assert {"suffix", "theirs", "their-model", "their-samples", "plain"} <= set(listed)
    assert not {"their-draft", "their-notes", "their-states", "broken"} & set(listed)


def test_it_is_chosen_by_its_name_and_what_is_missing_is_said(package: ModuleType) -> None:
    names = [each.name for each in factory.load_drafters("theirs,suffix", SETTING)]
    assert names == ["theirs", "suffix"]
    with pytest.raises(UsageError, match="plain is of a class that does not inherit from Drafter"):
        factory.load_drafters("plain", SETTING)
    with pytest.raises(UsageError, match="their-draft needs a second model"):
        factory.load_drafters("their-draft", SETTING)
    with pytest.raises(UsageError, match="their-notes needs a text"):
        factory.load_drafters("their-notes", SETTING)
    with pytest.raises(UnsupportedModelError, match="their-states needs hidden states"):
        with_costs().choose("their-states")


def test_auto_takes_what_says_so(package: ModuleType) -> None:
    assert factory.auto_drafters(drafts=False, corpora=False) == ["suffix"]
    assert factory.auto_drafters(drafts=False, corpora=True) == ["suffix", "corpus", "their-notes"]
    assert factory.auto_drafters(drafts=True, corpora=False) == ["suffix", "cascade"]


def test_options_are_for_it_too(package: ModuleType) -> None:
    assert LoadOptions(drafter="theirs", lookahead="2,3,2").window
    assert LoadOptions(drafter="their-draft", draft=("small",)).drafts
    with pytest.raises(UsageError, match="their-draft needs a second model"):
        LoadOptions(drafter="their-draft")
    with pytest.raises(UsageError, match="would not be used"):
        LoadOptions(drafter="their-model", lookahead="2,3,2")
    assert LoadOptions(drafter="their-model").takes_turns
    assert not LoadOptions(drafter="theirs").takes_turns


@pytest.mark.parametrize("names", ["theirs", "theirs,suffix", "their-model"])
def test_the_text_is_the_plain_one_and_all_calls_arrive(
    names: str, engine: Callable[[str], Engine], package: ModuleType
) -> None:
    drafting = engine(names)
    assert tokens(drafting) == tokens(engine("none"))
    drafter = package.made[0]
    assert drafter.session is drafting._session and drafter.sampler is not None
    order = ["attach", "prepare", "begin", "propose", "observe"]
    assert list(dict.fromkeys(drafter.calls)) == order
    drafting.close()
    assert drafter.calls[-1] == "close"


@pytest.mark.parametrize("names", ["theirs", "theirs,suffix", "their-model"])
def test_its_state_goes_into_snapshots_and_its_counts_to_the_next_session(
    names: str, engine: Callable[[str], Engine], package: ModuleType, tmp_path: Path
) -> None:
    first, second = engine(names), engine(names)
    written = PROMPT + tokens(first)
    first.snapshot(tmp_path / "chat")
    tokens(second, [1, 2, 3])
    mine, others = package.made[-2:]
    second.restore(tmp_path / "chat")
    assert others.text == mine.text == written
    mine.rights = 7.0
    others.load(mine.state(learnt_only=True), learnt_only=True)
    stats = first._drafting.stats()
    assert stats[mine.name] == [7.0]
    third = engine(names)
    third._drafting.remember(stats)
    third.set_drafter(names)
    tokens(third)
    assert package.made[-1].rights >= 7.0


@pytest.mark.parametrize("method", ["propose", "observe", "begin", "state", "close"])
def test_its_faults_do_not_reach_the_text(
    method: str,
    engine: Callable[[str], Engine],
    package: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("their mistake")

    monkeypatch.setattr(package.Theirs, method, fails)
    drafting = engine("theirs")
    assert tokens(drafting) == tokens(engine("none"))
    drafting.close()
    told = [record.getMessage() for record in caplog.records if "their mistake" in record.message]
    assert len(told) == 1 and "theirs failed and is not asked again" in told[0]


def test_every_fault_of_it_is_survived(engine: Callable[[str], Engine]) -> None:
    parts = engine("none").parts
    report = check_faults(parts, [PROMPT, [9, 8, 7]], ["theirs"], steps=(1,), max_tokens=8)
    assert report.injected > 10 and report.survived == report.injected
    calls = {case.fault.call for case in report.cases if case.drafters == "theirs"}
    assert {"prepare", "begin", "propose", "state", "load"} <= calls
