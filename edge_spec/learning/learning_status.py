"""Says what was learnt, as JSON and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_spec.drafters.lookup import answers
from edge_spec.errors import UsageError
from edge_spec.learning.conditions import Conditions
from edge_spec.learning.folder import LearningFolder, LearningState, kept_folders, num_bytes
from edge_spec.storage.json_store import DamagedError


@dataclass(frozen=True)
class Learnt:
    """One model's."""

    folder: LearningFolder
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def name(self) -> str:
        """Returns the model's name."""
        return self.folder.path.name.rpartition("-")[0]

    def document(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        entries = self.folder.texts.entries()
        said = {
            "model": self.name,
            "path": str(self.folder.path),
            "answers": len(entries),
            "answer_tokens": sum(each.num_tokens for each in entries),
            "bytes": num_bytes(self.folder.path),
        }
        try:
            state = self.folder.state(self.name)
        except (DamagedError, OSError) as error:
            return {**said, "drafts": False, "damaged": " ".join(str(error).split())}
        return {**said, **self._learnt(state)}

    def _learnt(self, state: LearningState) -> dict[str, Any]:
        spent_s = state.spent_on(self.conditions.today())
        last = state.trials[-1] if state.trials else None
        return {
            "learnt_tokens": state.learnt_tokens,
            "drafts": state.chosen is not None,
            "gain": None if last is None else round(last.gain, 3),
            "tokens_a_round": None if last is None else last.tokens_a_round,
            "trials": len(state.trials),
            "spent_today_s": round(spent_s, 1),
            "rests": self.conditions.why_not(spent_s),
        }


@dataclass(frozen=True)
class Remembered:
    """The file of what requests to one model wrote, from which `--remember` drafts."""

    path: Path

    @property
    def name(self) -> str:
        """Returns the model's name."""
        return self.path.stem.rpartition("-")[0]

    def document(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {"model": self.name, "path": str(self.path), "bytes": self.path.stat().st_size}


def remembered_of(model: str | None) -> list[Remembered]:
    """Returns the files of this model, by its name or the name of its file; of all where None."""
    found = map(Remembered, answers.kept_files())
    return [each for each in found if model in (None, each.name, each.path.stem)]


def learnt_of(model: str | None) -> list[Learnt]:
    """Returns what was learnt of this model, by its name or the name of its folder; of all where
    None. Raises UsageError where there is nothing of a model that was named."""
    found = [Learnt(each) for each in kept_folders()]
    if model is None:
        return found
    named = [each for each in found if model in (each.name, each.folder.path.name)]
    if not named and not remembered_of(model):
        names = {each.name for each in found} | {each.name for each in remembered_of(None)}
        kept = ", ".join(sorted(names)) or "nothing"
        raise UsageError(
            f"nothing was learnt from answers of {model}", remedy=f"What is kept: {kept}."
        )
    return named


def told(
    documents: Sequence[Mapping[str, Any]], remembered: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """Lines for a person."""
    if not (documents or remembered):
        yield "Nothing is kept of answers."
    for each in remembered:
        size = each["bytes"] / 1e6
        yield f"{each['model']}: {size:.1f} MB of answers that draft others, in {each['path']}"
    for each in documents:
        size = each["bytes"] / 1e6
        yield (
            f"{each['model']}: {each['answers']} answers, {each['answer_tokens']} tokens, "
            f"{size:.1f} MB in {each['path']}"
        )
        yield f"  {_outcome(each)}"
        if each.get("rests"):
            yield f"  it does not learn now: {each['rests']}"


def _outcome(told: Mapping[str, Any]) -> str:
    if "damaged" in told:
        return f"what was learnt is damaged and is made again: {told['damaged']}"
    if not told["learnt_tokens"]:
        return "no head has been trained yet"
    if told["gain"] is None:
        return f"a head has learnt from {told['learnt_tokens']} tokens and was not measured yet"
    verb = "drafts" if told["drafts"] else "does not draft"
    return (
        f"the head {verb}: on the last answers it takes {1 / told['gain']:.2f} of the time without "
        f"it ({told['trials']} measurements)"
    )
