"""A conversation that is put away and taken up again goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Session
from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.drafters.jacobi import LookaheadDrafter
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.engine import Engine
from edge_spec.engine.snapshot_file import read_snapshot, write_snapshot
from edge_spec.engine.speculation import Speculation
from edge_spec.errors import SnapshotError, UsageError
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB = 260  # of the byte tokenizer
PROMPT = list(b"one two one two one")
SAMPLING = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.0, seed=5)}


class CountingModel(ScriptedModel):
    """Every token so far decides the next. Counts what its sessions read beside scored rows."""

    def __init__(self, order: int = 10_000, context_length: int = 512) -> None:
        super().__init__(random_logits(VOCAB, order=order), VOCAB, context_length)
        self.num_prefilled = 0

    def open_session(self) -> ScriptedSession:
        return CountingSession(self)


class CountingSession(ScriptedSession):
    _model: CountingModel

    def prefill(self, tokens: Sequence[int]) -> None:
        self._model.num_prefilled += len(tokens)
        super().prefill(tokens)


class TellsNothing:
    """A session without the optional protocol."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.prefill, self.forward = session.prefill, session.forward
        self.commit, self.rollback = session.commit, session.rollback
        self.close = session.close

    @property
    def length(self) -> int:
        return self._session.length


class TellsNothingModel(CountingModel):
    def open_session(self) -> Any:
        return TellsNothing(super().open_session())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.snapshot"


@pytest.fixture
def make(make_engine: Any) -> Callable[..., Engine]:
    """make(drafters, model=..., tie_margin=..., exact=..., draft=...)"""

    def make(
        drafters: Sequence[Any] = (),
        model: ScriptedModel | None = None,
        tie_margin: float = 0.0,
        exact: bool = False,
        draft: Draft | None = None,
        **parts: Any,
    ) -> Engine:
        made: Engine = make_engine(model or CountingModel(), drafters, **parts)
        speculation = made.parts.speculation
        if draft is not None:
            drafters = [draft.make_drafter()]
        lossless = Losslessness(tie_margin=tie_margin)
        speculation = Speculation(drafters, speculation.policy, lossless)
        speculation_factory = replace(
            made.parts.speculation_factory,
            lossless=Losslessness(widths=(1, 2, 4, 8) if exact else ()),
        )
        made.parts = replace(
            made.parts, speculation_factory=speculation_factory, speculation=speculation
        )
        return Engine(replace(made.parts, drafts=[] if draft is None else [draft]))

    return make


def write(engine: Engine, prompt: Sequence[int], count: int = 30, **options: Any) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=count, **options).tokens]


def snapshot_of(engine: Engine, path: Path) -> bytes:
    engine.snapshot(path)
    return path.read_bytes()


def small_draft(identity: str = "small") -> Draft:
    return Draft(CountingModel(order=2), VOCAB, identity=identity)


DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: [],
    "suffix": lambda: [SuffixDrafter()],
    "recycling": lambda: [RecyclingDrafter()],
    "lookahead": lambda: [LookaheadDrafter()],
    "draft-model": small_draft,
}


def engine_with(make: Any, drafters: str) -> Engine:
    made = DRAFTERS[drafters]()
    draft = {"draft": made} if isinstance(made, Draft) else {"drafters": made}
    engine: Engine = make(model=CountingModel(order=2), **draft)  # a text that can be drafted
    return engine


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafters", DRAFTERS)
def test_a_restored_conversation_goes_on_as_the_original(
    make: Any, path: Path, drafters: str, sampling: str
) -> None:
    options = {"sampling": SAMPLING[sampling]}
    engine, other = engine_with(make, drafters), engine_with(make, drafters)
    begun = PROMPT + write(engine, PROMPT, **options)
    prompt = begun + list(b" two one two")
    write(other, list(b"something else"), 5)  # which it forgets
    engine.snapshot(path, {"messages": ["ü"]})
    assert other.restore(path) == {"messages": ["ü"]}
    expected, found = (each.generate(prompt, max_tokens=30, **options) for each in (engine, other))
    assert found.tokens == expected.tokens  # with their origins: drafters drafted alike
    assert found.stats.cached_n == expected.stats.cached_n == len(begun) - 1
    assert found.stats.draft_n_accepted == expected.stats.draft_n_accepted
    assert drafters == "none" or found.stats.draft_n > 0


def test_a_text_is_read_again_where_the_session_cannot_tell_its_cache(
    make: Any, path: Path
) -> None:
    engine, other = make(model=TellsNothingModel()), make(model=TellsNothingModel())
    prompt = PROMPT + write(engine, PROMPT)
    engine.snapshot(path)
    other.restore(path)
    assert other.parts.model.num_prefilled == len(prompt) - 1
    assert write(other, prompt) == write(engine, prompt)
    assert other.last.stats.cached_n == len(prompt) - 1


NOISY, EXACT, PLAIN = {"tie_margin": 0.3}, {"exact": True}, {"tie_margin": 0.0}


@pytest.mark.parametrize(
    ("taken", "restored", "kept"),
    [
        (NOISY, NOISY, True),
        (NOISY, PLAIN, False),
        (NOISY, EXACT, False),
        (PLAIN, NOISY, True),
        (PLAIN, PLAIN, True),
        (PLAIN, EXACT, False),
        (EXACT, NOISY, True),
        (EXACT, PLAIN, False),
        (EXACT, EXACT, True),
        ({"computing": "cpu"}, {"computing": "gpu"}, False),
    ],
)
def test_a_cache_is_kept_only_where_it_keeps_the_promise(
    make: Any, path: Path, taken: Any, restored: Any, kept: bool
) -> None:
    engine, other = make(**taken), make(**restored)
    prompt = PROMPT + write(engine, PROMPT)
    engine.snapshot(path)
    other.restore(path)
    assert other.parts.model.num_prefilled == (0 if kept else len(prompt) - 1)
    assert write(other, prompt, 3) == write(engine, prompt, 3)
    assert other.last.stats.cached_n == len(prompt) - 1


@pytest.mark.parametrize(
    "other",
    [
        {"identity": "b"},
        {"model": ScriptedModel(random_logits(200), 200)},
    ],
    ids=["files", "architecture"],
)
def test_a_snapshot_of_another_model_is_refused(make: Any, path: Path, other: Any) -> None:
    make(identity="a").snapshot(path)
    with pytest.raises(SnapshotError, match="was made with test"):
        make(**{"identity": "a"} | other).restore(path)
    make(identity="a").restore(path)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(make: Any, path: Path, token: int) -> None:
    engine = make()
    engine.snapshot(path)
    tokens = np.array([VOCAB - 1, token], np.int32)
    write_snapshot(path, replace(read_snapshot(path), tokens=tokens))
    with pytest.raises(SnapshotError, match="tokens outside the vocabulary of 260"):
        engine.restore(path)


def test_a_running_answer_is_not_cut_by_a_snapshot(make: Any, path: Path) -> None:
    engine = make([SuffixDrafter()])
    expected = write(engine, PROMPT)
    running = engine.generate(PROMPT, max_tokens=30, stream=True)
    for _ in range(2):
        with pytest.raises(UsageError, match="an answer is being written"):
            engine.snapshot(path)
        next(running)
    assert [token.id for token in running.finish().tokens] == expected
    engine.snapshot(path)
    engine.generate(PROMPT, stream=True).close()
    engine.snapshot(path)


def test_after_a_failed_answer_the_conversation_can_be_kept(make: Any, path: Path) -> None:
    class Failing(SuffixDrafter):
        rounds = 0

        def observe(self, *outcome: Any) -> None:
            self.rounds += 1
            if self.rounds == 3:
                raise KeyboardInterrupt
            super().observe(*outcome)

    engine, other = make([Failing()]), make()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, max_tokens=10)
    engine.snapshot(path)
    other.restore(path)
    prompt = PROMPT + list(b" go on")
    assert write(other, prompt) == write(make(), prompt)
    assert other.last.stats.cached_n >= len(PROMPT) - 1


class Refuses(SuffixDrafter):
    """Restored after others of its engine, and always in vain."""

    name = "refuses"
    refused = True

    def load(self, state: Any, learnt_only: bool = False) -> None:
        if self.refused and not learnt_only:
            self.refused = False  # its own state is put back
            raise ValueError("no such state")
        super().load(state, learnt_only)


class RefusingSession(CountingSession):
    def restore(self, state: Any, length: int) -> None:
        raise ValueError("no such cache")


class RefusingModel(CountingModel):
    def open_session(self) -> ScriptedSession:
        return RefusingSession(self)


@pytest.mark.parametrize("which", ["drafter", "cache"])
def test_what_does_not_fit_changes_nothing(make: Any, path: Path, which: str) -> None:
    drafters = [SuffixDrafter(), Refuses()] if which == "drafter" else [SuffixDrafter()]
    model = CountingModel() if which == "drafter" else RefusingModel()
    engine = make([SuffixDrafter(), Refuses()] if which == "drafter" else [SuffixDrafter()])
    write(engine, list(b"another text, another text"))
    engine.snapshot(path)
    other = make(drafters, model=model)
    prompt = PROMPT + write(other, PROMPT)
    before = snapshot_of(other, path.with_name("before"))
    with pytest.raises(SnapshotError, match="does not fit test on scripted: no such"):
        other.restore(path)
    assert snapshot_of(other, path.with_name("after")) == before
    write(other, prompt, 1)
    assert other.last.stats.cached_n == len(prompt) - 1
