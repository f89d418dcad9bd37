"""A pair with its draft going on while the target verifies, and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, failed, judged, not_measured
from edge_spec.diagnostics.bench.measuring import DRAFTING, PLAIN, EngineSide, Run, make_plan
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

_MAX_TOKENS = 32
_MOST_PROMPTS = 6
_SHARE = 0.45  # of the time, for each of the two


@dataclass(frozen=True)
class PairRuns:
    """Answers to the same prompts, in their order."""

    drafting: Sequence[Run]
    plain: Sequence[Run]

    @property
    def tokens_per_s(self) -> float:
        return sum(run.num_tokens for run in self.drafting) / max(
            1e-9, sum(run.seconds for run in self.drafting)
        )


def check_overlap(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """Each with engines of its own, one after the other."""
    found = {}
    for name in ("off", "on"):
        share = Deadline(_SHARE * deadline.seconds)
        found[name] = _answers(request, name, share)
    yield from judge_overlap(found["off"], found["on"])


def _answers(request: AcceptRequest, overlap: str, deadline: Deadline) -> PairRuns:
    """As many prompts as there is time for, one at the least."""
    drafted: list[Run] = []
    plain: list[Run] = []
    with request.engine(draft_overlap=overlap, drafter="draft-model") as engine:
        prompts = read_prompts(OWN_PROMPTS, per_category=1)[:_MOST_PROMPTS]
        plan = make_plan(engine, prompts, _MAX_TOKENS, 1)
        for task in plan.tasks:
            with engine.verifying_all_draft_tokens():
                drafted.append(EngineSide(engine, DRAFTING).decode(task.tokens, _MAX_TOKENS))
            plain.append(EngineSide(engine, PLAIN).decode(task.tokens, _MAX_TOKENS))
            if deadline.left_s <= 0:
                break
    return PairRuns(drafted, plain)


def judge_overlap(off: PairRuns, on: PairRuns) -> Iterator[CheckRow]:
    count = min(len(off.drafting), len(on.drafting))
    for name, pair in (("off", off), ("on", on)):
        yield _texts(name, pair)
    if not sum(run.stats.draft_n for run in on.drafting):
        yield not_measured("off and on", "nothing was drafted")
        return
    parted = _parted(off.drafting[:count], on.drafting[:count])
    rates = off.tokens_per_s, on.tokens_per_s
    numbers = {"off_tokens_per_s": rates[0], "on_tokens_per_s": rates[1], "texts": count}
    speed = f"{rates[1]:.1f} tokens/s with overlap, {rates[0]:.1f} without"
    if parted:
        yield failed("off and on", f"{parted} of {count} texts differ; {speed}", **numbers)
        return
    yield judged("off and on", count > 0, f"all {count} texts are equal; {speed}", **numbers)


def _texts(name: str, pair: PairRuns) -> CheckRow:
    parted = _parted(pair.drafting, pair.plain)
    drafted = sum(run.stats.draft_n for run in pair.drafting)
    accepted = sum(run.stats.draft_n_accepted for run in pair.drafting)
    return judged(
        f"overlap {name}",
        not parted,
        f"{parted} of {len(pair.plain)} texts differ from plain ones; {accepted} of {drafted} "
        "draft tokens accepted",
        texts=len(pair.plain),
        differing=parted,
        draft_n=drafted,
        draft_n_accepted=accepted,
    )


def _parted(some: Sequence[Run], others: Sequence[Run]) -> int:
    return sum(one.tokens != other.tokens for one, other in zip(some, others, strict=True))
