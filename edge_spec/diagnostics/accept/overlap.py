"""A pair with its draft going on while the target verifies, and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, judged, not_measured
from edge_spec.diagnostics.bench.measuring import DRAFTING, EngineSide, Run, make_plan
from edge_spec.diagnostics.lossless_check.texts import TextComparison, Texts
from edge_spec.engine.request import GREEDY
from edge_spec.exactness.batch_invariance import measure_batch_invariance
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

_MAX_TOKENS = 32
_MOST_PROMPTS = 6
_SHARE = 0.45  # of the time, for each of the two
_NO_TEXTS = Texts(0, 0, 0, 0, 0, ())


@dataclass
class PairAnswers:
    """texts: against plain ones, every draft token verified; forced: the same again; runs: as it is
    set up, which may leave out what does not pay."""

    texts: Texts = _NO_TEXTS
    forced: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(run.seconds for run in self.runs)
        return sum(run.num_tokens for run in self.runs) / max(1e-9, seconds)

    @property
    def overlapped_rounds(self) -> int:
        return sum(run.stats.anticipated_n for run in [*self.forced, *self.runs])


def check_overlap(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """Each with engines of its own, one after the other."""
    found = {}
    for overlap in ("off", "on"):
        found[overlap] = _answers(request, overlap, Deadline(_SHARE * deadline.seconds))
        yield _judge_texts(overlap, found[overlap])
    yield judge_overlap(found["off"], found["on"])


def _answers(request: AcceptRequest, overlap: str, deadline: Deadline) -> PairAnswers:
    """As many prompts as there is time for, one at the least. Near ties are left as they come:
    where they are decided by plain steps, nothing overlaps."""
    found = PairAnswers()
    with request.engine(draft_overlap=overlap, drafter="draft-model", lossless="ties") as engine:
        noise = measure_batch_invariance(engine.parts.model).tie_margin
        side = EngineSide(engine, DRAFTING)
        comparison = TextComparison(engine, GREEDY, _MAX_TOKENS, noise)
        prompts = read_prompts(OWN_PROMPTS, per_category=1)[:_MOST_PROMPTS]
        for task in make_plan(engine, prompts, _MAX_TOKENS, 1).tasks:
            with engine.verifying_all_draft_tokens():
                found.texts += comparison.texts("", [task], lambda what, fraction: None)
                found.forced.append(side.decode(task.tokens, _MAX_TOKENS))
            found.runs.append(side.decode(task.tokens, _MAX_TOKENS))
            if deadline.left_s <= 0:
                break
    return found


def _judge_texts(overlap: str, found: PairAnswers) -> CheckRow:
    texts = found.texts
    wrong = [each for each in texts.differing if not each.near_tie]
    near = len(texts.differing) - len(wrong)
    told = f"{len(wrong)} of {texts.num_prompts} texts differ from plain ones"
    told += f", {near} more at near ties" if near else ""
    told += f"; {texts.num_accepted} of {texts.num_guesses} draft tokens accepted"
    numbers = {"texts": texts.num_prompts, "differing": len(wrong), "near_ties": near}
    numbers |= {"draft_n": texts.num_guesses, "draft_n_accepted": texts.num_accepted}
    name = f"texts with overlap {overlap}"
    if texts.passed is None:
        return not_measured(name, "nothing was drafted", **numbers)
    return judged(name, texts.passed, told, **numbers)


def judge_overlap(off: PairAnswers, on: PairAnswers) -> CheckRow:
    """Its worth: it may well be slower, as on one device."""
    speed = f"{on.tokens_per_s:.1f} tokens/s with overlap, {off.tokens_per_s:.1f} without"
    rounds = on.overlapped_rounds
    numbers = {
        "off_tokens_per_s": off.tokens_per_s,
        "on_tokens_per_s": on.tokens_per_s,
        "overlapped_rounds": rounds,
    }
    if not rounds:
        return not_measured("rate", f"no round began with tokens drafted ahead; {speed}", **numbers)
    found = f"{speed}; {rounds} rounds began with tokens drafted ahead"
    return judged("rate", off.overlapped_rounds == 0, found, **numbers)
