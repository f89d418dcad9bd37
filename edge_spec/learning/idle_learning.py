"""Does the work of the process that learns: it judges the heads on answers that they have not seen,
then trains a new one on all answers. It may be killed at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import TensorRows
from edge_spec.distill.conversations import Conversation, most_written
from edge_spec.distill.drafter_training import Drafter
from edge_spec.distill.tensor_file import read_tensors
from edge_spec.drafters.heads.layers import one_blas_thread
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.errors import EdgeSpecError
from edge_spec.learning.conditions import Conditions
from edge_spec.learning.folder import ForgottenError, LearningFolder, LearningState, Trial
from edge_spec.learning.head_training import (
    HeadTraining,
    load_training,
    require_shapes,
    save_training,
)
from edge_spec.learning.texts import LearntText, TextEntry
from edge_spec.learning.training import Heads, Teacher
from edge_spec.learning.trial import Place, best_head, open_learnt_head, replay_texts
from edge_spec.loader.head import StoredTables, open_tables
from edge_spec.models.source import Source
from edge_spec.placement.idle_process import LOWEST, give_way
from edge_spec.storage.json_store import DamagedError

FIRST_TOKENS = 1000  # of answers, from which a first head is trained
FIRST_TEXTS = 4
_MORE = 0.1  # of what a head has learnt from: so much new text makes another one
TRIAL_TOKENS, TRIAL_TEXTS, _MOST_TRIAL_TEXTS = 400, 4, 12
MARGIN = 0.02  # by which a head has to beat drafting without it
_VOCABULARY = 4096
_HELD_OUT = 8  # of this many texts, one says when training has to end
_LOOKED_EVERY_S = 2.0


class Task(Enum):
    """Names what there is to do."""

    JUDGE = "judge"
    TRAIN = "train"


@dataclass(frozen=True)
class Assignment:
    """Says what the process works on. model: whose output matrix heads score with."""

    model: str
    place: Place
    eos_ids: tuple[int, ...] = ()


ASSIGNMENT = TypeAdapter(Assignment)


def next_task(
    state: LearningState, entries: Sequence[TextEntry], *, is_begun: bool = False
) -> Task | None:
    """entries: of all texts. is_begun: whether a training is unfinished."""
    if state.candidate is None:
        tokens = sum(each.num_tokens for each in entries)
        is_enough = tokens >= FIRST_TOKENS and len(entries) >= FIRST_TEXTS
        return Task.TRAIN if is_enough or is_begun else None
    unseen = [each for each in entries if each.number >= state.learnt_until]
    new = [each for each in unseen if each.number >= state.judged_until]
    if _tokens(new) >= TRIAL_TOKENS and len(new) >= TRIAL_TEXTS:
        return Task.JUDGE
    was_judged = state.judged_until > state.learnt_until
    needed = max(TRIAL_TOKENS, _MORE * state.learnt_tokens)
    if is_begun or (was_judged and _tokens(unseen) >= needed):
        return Task.TRAIN
    return None


def learn_while_idle(folder: str, assignment: str) -> dict[str, str | None]:
    """Does what there is to do. Raises an EdgeSpecError, OSError; ForgottenError is no failure."""
    give_way(LOWEST)
    asked = ASSIGNMENT.validate_json(assignment)
    with suppress(ForgottenError):
        IdleLearning(LearningFolder(Path(folder)), asked, Conditions()).run()
    return {}


class IdleLearning:
    """Raises an EdgeSpecError, OSError, ForgottenError."""

    def __init__(
        self,
        folder: LearningFolder,
        asked: Assignment,
        conditions: Conditions,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._folder = folder
        self._asked = asked
        self._conditions = conditions
        self._clock = clock
        self._id = folder.open()
        weights = open_tables(Source(asked.model, _quiet), "a head that learns here shares")
        self._weights: TensorRows = weights
        self._told_s = clock()  # until when the processor's time is in the state
        self._looked_s = -np.inf
        self._may = True
        self._state = self._readable_state()

    def run(self) -> None:
        """Does what there is to do, on one thread."""
        with one_blas_thread():
            self._run()

    def _run(self) -> None:
        while self._may_go_on():
            is_begun = self._folder.training.exists()
            task = next_task(self._state, self._folder.texts.entries(), is_begun=is_begun)
            if task is None:
                return
            if task is Task.JUDGE:
                self._judge()
            elif not self._train():
                return

    @property
    def _config(self) -> ModelConfig:
        config: ModelConfig = self._weights.config
        return config

    def _readable_state(self) -> LearningState:
        try:
            state = self._folder.state(self._asked.model)
            self._heads(state)
            return state
        except (DamagedError, EdgeSpecError, ValueError, OSError):
            with self._folder.writing(self._id):
                self._folder.start_again()
            return LearningState(1, self._asked.model)

    def _judge(self) -> None:
        """Judges the heads on the last answers that the newest head, and so any, has not learnt
        from."""
        state = self._state
        entries = [
            each for each in self._folder.texts.entries() if each.number >= state.learnt_until
        ]
        last = entries[-1].number
        texts = self._read(entries[-_MOST_TRIAL_TEXTS:])
        if not texts:  # none can be read: they are gone now
            return
        without = replay_texts(texts, self._config, self._asked.place, None)
        found = {
            name: replay_texts(texts, self._config, self._asked.place, network)
            for name, network in self._heads(state).items()
        }
        chosen = best_head(without, found, MARGIN)
        rounds = {name: each.tokens_a_round for name, each in found.items()}
        trial = Trial(
            first=max(entries[0].number, entries[-len(texts)].number),
            last=last,
            num_tokens=sum(len(each.tokens) for each in texts),
            without_s=without.seconds,
            with_s={name: each.seconds for name, each in found.items()},
            tokens_a_round={"": without.tokens_a_round, **rounds},
            chosen=chosen,
        )
        stats = {} if chosen is None else found[chosen].stats
        self._put(replace(state.after(trial), stats=stats))

    def _heads(self, state: LearningState) -> dict[str, MedusaNetwork]:
        names = {each for each in (state.candidate, state.chosen) if each}
        return {
            name: open_learnt_head(self._folder.head(name), self._config) for name in sorted(names)
        }

    def _train(self) -> bool:
        """Returns whether the training came to its end."""
        entries = self._folder.texts.entries()
        training = load_training(self._folder.training, self._config.hidden_size)
        training = training or self._new_training(entries[-1].number + 1)
        entries = [each for each in entries if each.number < training.until]
        held = [each for each in entries if each.number % _HELD_OUT == _HELD_OUT - 1]
        texts = self._read([each for each in entries if each not in held])
        if not texts:  # nothing of them can be read
            with self._folder.writing(self._id):
                self._folder.training.unlink(missing_ok=True)
            return False
        held_out = self._read(held)
        teacher = self._teacher([*texts, *held_out])
        if not training.run(
            teacher,
            teacher.examples(texts),
            teacher.examples(held_out) if held_out else None,
            self._may_go_on,
            self._keep,
        ):
            return False
        self._put_head(training, teacher, _tokens(entries))
        return True

    def _new_training(self, until: int) -> HeadTraining:
        """Begins a training from the newest head."""
        candidate = self._state.candidate
        if candidate is None:
            return HeadTraining(Heads.untrained(self._config.hidden_size), until, is_first=True)
        tensors, _ = read_tensors(self._folder.head(candidate) / "model.safetensors")
        parameters = {name: each for name, each in tensors.items() if ".linear." in name}
        require_shapes(parameters, self._config.hidden_size)
        return HeadTraining(Heads(parameters), until, is_first=False)

    def _teacher(self, texts: Sequence[LearntText]) -> Teacher:
        conversations = [
            Conversation(np.array([*each.prompt, *each.tokens.tolist()]), len(each.prompt), False)
            for each in texts
        ]
        config = self._config
        eos_ids = self._asked.eos_ids
        ids = most_written(conversations, config.vocab_size, _VOCABULARY, eos_ids)
        output = StoredTables(self._weights).output_rows(ids).astype(np.float32, copy=False)
        return Teacher(config, np.ascontiguousarray(output), ids)

    def _put_head(self, training: HeadTraining, teacher: Teacher, num_tokens: int) -> None:
        """The new head, then the state that names it: a kill between the two leaves the old one."""
        name = f"{training.until:08}"
        ids = teacher.token_ids
        tensors = {
            **training.result(),
            "lm_head.weight": teacher.output.astype(np.float16),
            "d2t": ids - np.arange(len(ids)),
        }
        config = {
            "medusa_num_heads": training.heads.count,
            "medusa_num_layers": 1,
            "hidden_size": self._config.hidden_size,
            "vocab_size": self._config.vocab_size,
        }
        with self._folder.writing(self._id):
            with self._folder.new_head(name) as work:
                Drafter(tensors, config, {}).write(work)
            self._state = self._with_time(
                replace(
                    self._state,
                    candidate=name,
                    learnt_until=training.until,
                    judged_until=training.until,
                    learnt_tokens=num_tokens,
                )
            )
            self._folder.put_state(self._state)
            self._folder.training.unlink(missing_ok=True)

    def _keep(self, training: HeadTraining) -> None:
        with self._folder.writing(self._id):
            save_training(self._folder.training, training)
            self._state = self._with_time(self._state)
            self._folder.put_state(self._state)

    def _put(self, state: LearningState) -> None:
        with self._folder.writing(self._id):
            self._state = self._with_time(state)
            self._folder.put_state(self._state)

    def _with_time(self, state: LearningState) -> LearningState:
        """Returns the state with the processor's time until now."""
        now_s, day = self._clock(), self._conditions.today()
        spent_s = state.spent_on(day) + now_s - self._told_s
        self._told_s = now_s
        return replace(state, day=day, spent_s=spent_s)

    def _may_go_on(self) -> bool:
        """Looks at the machine now and then."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOKED_EVERY_S:
            self._looked_s = now_s
            spent_s = self._state.spent_on(self._conditions.today()) + now_s - self._told_s
            self._may = self._conditions.why_not(spent_s) is None
        return self._may

    def _read(self, entries: Sequence[TextEntry]) -> list[LearntText]:
        return list(self._folder.texts.read(entries, self._config))


def _tokens(entries: Sequence[TextEntry]) -> int:
    return sum(each.num_tokens for each in entries)


def _quiet(what: str, fraction: float) -> None: ...
