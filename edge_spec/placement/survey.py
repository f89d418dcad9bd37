"""Measure the places where a model could run.

If a driver is involved, a separate process does the work, since a driver may crash, hang or exhaust
memory. Only correct places get a profile: a device must first agree with texts that the processor
wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated, reason_of, tell
from edge_spec.core.model import Model, Progress
from edge_spec.core.modes import LosslessMode
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.models.devices import PLANNED_TOKENS, Device, Sizing, free_bytes
from edge_spec.models.memory import Forecast, ModelMemory, by_label, room, shortage
from edge_spec.models.model_plan import PreparedModel
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Candidate, candidate_of, candidates, described
from edge_spec.scheduler.batch_invariance import USUAL_WIDTHS, BatchInvariance
from edge_spec.scheduler.lossless import Losslessness, keep_promise
from edge_spec.scheduler.measure import measure
from edge_spec.scheduler.profile import (
    Profile,
    ProfileKey,
    load_profile,
    save_profile,
)
from edge_spec.scheduler.row_findings import ROWS, rows_key, settle_rows
from edge_spec.storage.measurements import Quantity
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

OnStep = Callable[[float], None]  # receives the finished fraction
Text = tuple[Sequence[int], Sequence[int]]  # prompt and greedy answer

MEASURE_S = 15.0  # for all unknown places of a model together
_MOST_S, _LEAST_S = 8.0, 3.0  # for one place
_TIMEOUT_S = 300.0  # more than compiling a driver's kernels and measuring takes
_TEXTS, _TEXT_TOKENS = 2, 32  # greedy answers
_TEXT_ROWS = 32  # read in one pass
_LEAST_AGREEING = 0.25  # of the tokens; with other weights and kernels most agree


# Why a place cannot be used, so that nobody waits again; "": works again.
FAULTS = Quantity("fault", ProfileKey, lambda: TypeAdapter(str))


def measure_place(
    place: Candidate, max_s: float, on_step: OnStep, texts: Sequence[Text] = ()
) -> Profile:
    """Measure a place, and keep its profile and findings on rows. max_s: for its passes. texts:
    must match."""
    with closing(place.prepared.open()) as model:
        require_right(model, texts)
        key = rows_key(place.key, place.prepared.config)
        settle_rows(model, key, USUAL_WIDTHS, LosslessMode.AUTO)
        profile = measure(model, max_s, on_step)
    save_profile(place.key, profile)
    return profile


def measure_apart(
    place: Candidate, max_s: float, on_step: OnStep, texts: Sequence[Text]
) -> Profile:
    """Run `measure_place` in a separate process. Raises IsolatedError, NoAnswerError for a place
    not worth waiting for again."""
    done = 0.0

    def on_done(fraction: float) -> None:
        nonlocal done
        done = fraction
        on_step(fraction)

    request = [described(place.source.model, place.device, place.prepared.how), max_s, texts]
    with TemporaryDirectory() as directory:
        file = Path(directory) / "request"  # too long for a command line
        file.write_text(json.dumps(request), encoding="utf-8")
        try:
            found = isolated(measure_described, str(file), timeout_s=_TIMEOUT_S, on_step=on_done)
        except NoAnswerError as error:
            slow = f"it is too slow: {done:.0%} was done within {_TIMEOUT_S:g} s"
            raise (NoAnswerError(slow) if done else error) from None
    return TypeAdapter(Profile).validate_python(found)


def measure_described(file: str) -> Any:
    """Measure a place in the other process."""
    place, max_s, texts = json.loads(Path(file).read_text(encoding="utf-8"))
    return asdict(measure_place(candidate_of(place), max_s, tell, texts))


def require_right(model: Model, texts: Sequence[Text]) -> None:
    """Raise SessionError if logits are not finite, or prefer other tokens than the texts'."""
    rows = min(_TEXT_ROWS, model.capabilities.max_rows)
    right: list[bool] = []
    with closing(model.open_session()) as session:
        for prompt, tokens in texts or [((0, 0), (0,))]:
            session.rollback(0)
            session.prefill(prompt[:-1])
            read = [prompt[-1], *tokens[:-1]]
            for start in range(0, len(read), rows):
                chain = TokenTree.chain(read[start], read[start + 1 : start + rows])
                logits = session.forward(chain).logits
                if not np.isfinite(logits.max(axis=1)).all():
                    raise SessionError(
                        "it computes wrong: its scores are no numbers",
                        remedy="Choose another device.",
                    )
                right += (logits.argmax(axis=1) == tokens[start : start + rows]).tolist()
                session.commit(range(len(chain)))
    share = sum(right) / len(right)
    if texts and share < _LEAST_AGREEING:
        raise SessionError(
            f"it computes wrong: {share:.0%} of its tokens are the processor's",
            remedy="Choose another device.",
        )


def write_texts(place: Candidate) -> list[Text]:
    """Write greedy answers to short prompts."""
    found: list[Text] = []
    with (
        closing(place.prepared.open()) as model,
        closing(model.open_session()) as session,
    ):
        for prompt in short_prompts(place.prepared):
            session.rollback(0)
            session.prefill(prompt[:-1])
            token = prompt[-1]
            tokens: list[int] = []
            while len(tokens) < _TEXT_TOKENS:
                logits = session.forward(TokenTree.chain(token)).logits
                session.commit([0])
                token = int(logits[0].argmax())
                tokens.append(token)
            found.append((prompt, tokens))
    return found


def short_prompts(prepared: PreparedModel) -> list[list[int]]:
    """Return the shortest packaged prompts, cut so that an answer fits."""
    room = max(2, prepared.config.context_length - _TEXT_TOKENS)
    prompts = read_prompts(OWN_PROMPTS, per_category=2)
    found = sorted((prepared.text.prompt_of(each.text)[:room] for each in prompts), key=len)
    return found[:_TEXTS]


@dataclass(frozen=True)
class MeasuredPlace:
    """A place with its profile; None if the model does not fit there."""

    candidate: Candidate
    profile: Profile | None
    rows: BatchInvariance | None = None  # None: unknown

    @property
    def lossless(self) -> Losslessness | None:
        """How the default guarantee is kept there, if known."""
        return None if self.rows is None else keep_promise(LosslessMode.AUTO, self.rows)


class Surveyor:
    """Measures a target's and its draft's places. notes: on unusable places and uncertain profiles,
    a line each. free: before any model is open. refresh: also measure known places and retry failed
    ones."""

    def __init__(self, devices: Sequence[Device], progress: Progress, refresh: bool) -> None:
        self.notes: list[str] = []
        self._by_label = by_label(devices)
        self.free = room(free_bytes(), self._by_label)
        self._refresh = refresh
        self._devices = devices
        self._progress = progress
        self._silent: dict[tuple[str, str], str] = {}  # by runtime and device

    def survey(self, source: Source, options: LoadOptions, role: str = "") -> list[MeasuredPlace]:
        """Return the working places. One model is open at a time, if it fits. Each profile is saved
        at once, so an interrupt loses little. role: "draft: " for a draft. Raises an EdgeSpecError
        if there is no place, OSError."""
        places, refused = candidates(
            source, options, self._devices, self._progress, is_draft=bool(role)
        )
        for line in refused:
            self.note(f"{role}{line}")
        fitting = [each for each in places if self._shortage(each) is None]
        num_new = sum(self._known(each) is None and not self._fault(each) for each in fitting)
        max_s = min(_MOST_S, max(_LEAST_S, MEASURE_S / max(1, num_new)))
        found: list[MeasuredPlace] = []
        texts = cache(partial(self._texts, found))
        # The processor first: it cannot crash, and writes the texts.
        for place in sorted(fitting, key=lambda each: each.is_risky):
            try:
                profile = self._known(place) or self._measure(place, max_s, texts)
            except IsolatedError as error:
                self.note(f"{role}{place.place}: {error}")
                continue
            rows = ROWS.known(rows_key(place.key, place.prepared.config))
            found.append(MeasuredPlace(place, profile, rows))
            if not profile.is_certain:
                self.note(
                    f"{role}{place.place}: the machine was busy, the times are uncertain by "
                    f"{profile.spread:.0%}: the next plan measures them again"
                )
        return found + [MeasuredPlace(each, None) for each in places if each not in fitting]

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def _known(self, place: Candidate) -> Profile | None:
        return None if self._refresh or self._fault(place) else load_profile(place.key)

    def _fault(self, place: Candidate) -> str:
        known = None if self._refresh else FAULTS.known(place.key)
        if known:
            return f"{known} (--refresh tries it again)"
        return self._silent.get((place.key.runtime, place.key.device), "")

    def _measure(self, place: Candidate, max_s: float, texts: Callable[[], list[Text]]) -> Profile:
        """texts: for a device to match. Raises IsolatedError."""
        if fault := self._fault(place):
            raise IsolatedError(fault)
        on_step = partial(self._progress, f"Measuring {place.prepared.name} on {place.place}")
        try:
            if place.is_risky:
                profile = measure_apart(place, max_s, on_step, texts())
            else:
                profile = measure_place(place, max_s, on_step)
        except Exception as error:  # of any library
            reason = str(error) if isinstance(error, IsolatedError) else reason_of(error)
            FAULTS.keep(place.key, reason)
            if isinstance(error, NoAnswerError):
                self._silent[place.key.runtime, place.key.device] = reason
            raise IsolatedError(reason) from error
        if FAULTS.known(place.key):
            FAULTS.keep(place.key, "")
        on_step(1.0)
        return profile

    def _texts(self, found: Sequence[MeasuredPlace]) -> list[Text]:
        """Return texts that the processor wrote, or [] if nothing shows what is right."""
        for each in found:
            place = each.candidate
            if place.is_risky:
                break
            self._progress(f"Writing texts on {place.place}", 0.0)
            try:
                return write_texts(place)
            except Exception as error:  # of any library
                self.note(f"{place.place}: {reason_of(error)}")
        return []

    def _shortage(self, place: Candidate) -> str | None:
        needs = self.needs(place)
        return None if needs is None else shortage(needs, self.free)

    def needs(self, *together: Candidate) -> dict[str, int] | None:
        """Return the models' memory together, with PLANNED_TOKENS of text; None if unknown."""
        models = []
        for each in together:
            runtime = each.prepared.runtime
            if not isinstance(runtime, Sizing):
                return None
            memory = runtime.memory(each.prepared.source, each.prepared.how, PLANNED_TOKENS)
            models.append(ModelMemory("", each.prepared.name, runtime.name, memory))
        return Forecast(tuple(models), None, self._by_label).needs
