"""What opening a model or a pair would open here, whether one can draft for the other, whether both
fit, and whether speculation pays: from headers and from what was measured before."""

from __future__ import annotations

import os
import reprlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import list2cmdline
from typing import NamedTuple

from edge_spec.core.model import Progress
from edge_spec.diagnostics.doctor.report import Finding, fault, note, ok, warning
from edge_spec.diagnostics.doctor.subject import CONVERSATION, SAMPLE, Examined
from edge_spec.errors import UnsupportedModelError
from edge_spec.models import runtimes
from edge_spec.models.bundle import ROLES
from edge_spec.models.devices import PLANNED_TOKENS, format_bytes
from edge_spec.models.draft_choice import LARGEST_SHARE, cheapest
from edge_spec.models.memory import forecast, what_fits
from edge_spec.models.model_plan import ModelPlan, PreparedModel
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.cost import RowCosts, forecast_speedup
from edge_spec.scheduler.engine_plan import EnginePlan, choose_plan, plan_engine
from edge_spec.scheduler.profile import Profile, load_profile, profile_key
from edge_spec.scheduler.row_findings import ROWS, rows_key
from edge_spec.text.vocabulary import Compared, compare


@dataclass(frozen=True)
class Opening:
    """One model of a plan; prepared is None where it would be converted first."""

    role: str
    plan: ModelPlan
    prepared: PreparedModel | None


@dataclass(frozen=True)
class Chosen:
    """What a start would open. asked: the draft that was named; tokens: of the pair; openings: the
    target, and the draft where there is one."""

    plan: EnginePlan
    asked: Source | None
    tokens: Tokens | None
    openings: list[Opening]

    @property
    def prepared(self) -> list[PreparedModel]:
        return [each.prepared for each in self.openings if each.prepared is not None]

    @property
    def context_length(self) -> int:
        own = self.prepared[0].config.context_length
        return min(own, self.plan.options.context_length or own)

    @property
    def is_retokenized(self) -> bool:
        return self.tokens is not None and not self.tokens.compared.is_same

    def command(self, name: str) -> str:
        draft = [] if self.asked is None else ["--draft", self.asked.model]
        words = ["edge-spec", name, self.plan.source.model, *draft]
        return list2cmdline(words) if os.name == "nt" else shlex.join(words)

    @property
    def is_converted(self) -> bool:
        return len(self.prepared) == len(self.openings)


def choose(
    source: Source,
    draft: Source | None,
    tokens: Tokens | None,
    progress: Progress,
    places: LoadOptions | None = None,
    head: Path | None = None,
) -> Chosen:
    """places: runtimes, devices and context as asked for. head: that was named as its draft. Raises
    an EdgeSpecError where a runtime cannot have a model."""
    drafts = () if draft is None else (draft.model,)
    asked = replace(places or LoadOptions(), draft=drafts, head=head)
    plan, _ = choose_plan(plan_engine(source, asked))
    openings = [Opening(ROLES[0], plan.target, plan.target.find(progress))]
    for each in plan.drafts:
        prepared = each.find(progress)
        if prepared is not None:
            prepared = cheapest(prepared, each.source, progress, makes=False)
        openings.append(Opening(ROLES[1], each, prepared))
    return Chosen(plan, draft, tokens, openings)


def require_convertible(opening: Opening) -> None:
    """Raises what opening a model that is not prepared would, if headers show it."""
    reads = opening.plan.runtime.reads
    try:
        opening.plan.require_convertible()
    except UnsupportedModelError as error:
        if reads == "gguf" or not opening.plan.source.at(reads).is_file():
            raise
        option = "--runtime" if opening.role == ROLES[0] else "--draft-runtime"
        reader = f"Add {option} {runtimes.auto_runtime({'gguf'})}, which reads the file as it is."
        raise UnsupportedModelError(error.message, remedy=f"{reader} {error.remedy}") from None


_SHOWN = 3
_LISTED = 30  # in JSON
_SAME_FAMILY = "One of the target's family is quicker: edge-spec pull hf:ORG/NAME --draft auto."


@dataclass(frozen=True)
class Tokens:
    """Says what two vocabularies have in common. ratio: tokens of the draft for each of the
    target's, in one text of several languages and code."""

    target_size: int
    draft_size: int
    num_shared_texts: int
    compared: Compared
    ratio: float

    def numbers(self) -> dict[str, object]:
        return {
            "same": self.compared.is_same,
            "drafting": "draft-model" if self.compared.is_same else "retokenized",
            "target_size": self.target_size,
            "draft_size": self.draft_size,
            "num_shared_ids": self.compared.num_shared,
            "num_different": len(self.compared.different),
            "num_shared_texts": self.num_shared_texts,
            "different": [
                {"id": id, "target": token, "draft": other}
                for id, token, other in self.compared.different[:_LISTED]
            ],
            "draft_tokens_per_target_token": self.ratio,
        }


def compare_tokens(target: Examined, draft: Examined) -> Tokens:
    """Raises an EdgeSpecError for a tokenizer that cannot be read."""
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    text = SAMPLE + "".join(str(message["content"]) for message in CONVERSATION)
    num_draft, num_target = (len(each.text.tokenizer.encode(text)) for each in (draft, target))
    return Tokens(
        len(known),
        len(drafted),
        len(known.keys() & drafted.keys()),
        compare(known, drafted),
        num_draft / num_target,
    )


def check_pair(
    target: Examined, draft: Examined, tokens: Tokens, numbers: dict[str, object]
) -> Iterator[Finding]:
    numbers["vocabulary"] = tokens.numbers()
    yield from _tokens(tokens)
    ends = [sorted(each.text.eos_ids) for each in (target, draft)]
    if tokens.compared.is_same and ends[0] != ends[1]:
        found = f"the target's texts end in {ends[0]}, the draft's in {ends[1]}"
        yield warning("ends", found, "Draft tokens at the end of an answer may be wrong.")
    if target.is_other or draft.is_other:
        yield note("size", "not known before a model is converted, nor is its context")
        return
    yield _size(target, draft, numbers)
    yield _context(target, draft)


def _tokens(tokens: Tokens) -> Iterator[Finding]:
    """Differences token by token, as target | draft, and what follows from them."""
    compared = tokens.compared
    sizes = tokens.target_size, tokens.draft_size
    if compared.is_same:
        alone = [size - compared.num_shared for size in sizes]
        beyond = f"; {alone[0]} only the target's, {alone[1]} the draft's" if any(alone) else ""
        yield ok("tokens", f"the same {compared.num_shared} ids{beyond}")
        return
    yield warning(
        "tokens",
        f"{len(compared.different)} of {compared.num_shared} ids that both have differ "
        f"({sizes[0]} | {sizes[1]} tokens): draft tokens are passed on as text, {tokens.ratio:.2f} "
        "tokens of the draft for each of the target's",
        _SAME_FAMILY,
    )
    shown = "; ".join(
        f"{id}: {reprlib.repr(token)} | {reprlib.repr(other)}"
        for id, token, other in compared.different[:_SHOWN]
    )
    if shown:
        yield note("tokens", shown)


def _size(target: Examined, draft: Examined, numbers: dict[str, object]) -> Finding:
    share = draft.config.num_parameters / target.config.num_parameters
    numbers["size_share"] = share
    found = f"the draft has {share:.0%} of the target's parameters"
    if share <= LARGEST_SHARE:
        return ok("size", found)
    remedy = f"Choose one with at most {LARGEST_SHARE:.0%}: each draft token takes a step of it."
    return warning("size", found, remedy)


def _context(target: Examined, draft: Examined) -> Finding:
    length, whole = draft.config.context_length, target.config.context_length
    found = f"the draft reads {length} tokens, the target {whole}"
    if length >= whole:
        return ok("context", found)
    return warning(
        "context",
        f"{found}: after {length} nothing is drafted and rounds are plain",
        f"Give --context {length}, or a draft with a longer context.",
    )


_SMALLER = "a smaller quantization or no --draft"
DRAFT_TOKENS = range(1, 9)
_WIDTHS = range(1, DRAFT_TOKENS[-1] + 2)  # rows of the passes that verify them
_COUNTS = (1, 2, 4, 8)  # of draft tokens
_SLOW = 1.0  # steps of the target that one of the draft takes
_PRECISION = 1e-4


class Costs(NamedTuple):
    """Holds the costs of one round: passes by rows, and what one draft token takes; 0 where it is
    looked up in text."""

    rows: RowCosts
    draft_s: float

    @property
    def draft_share(self) -> float:
        return self.draft_s / self.rows.at(1)


def check_speed(chosen: Chosen, numbers: dict[str, object]) -> Iterator[Finding]:
    """Nothing is measured here: what profiles have left."""
    numbers["plan"] = chosen.plan.explain()
    for line in chosen.plan.explain()[1:]:
        what, _, told = line.partition(": ")
        yield ok(what, told)
    yield from _lossless(chosen)
    profiles = [_profile(each) for each in chosen.openings]
    costs = _costs(chosen, profiles)
    if costs is None:
        missing = [
            f"the {opening.role} on {opening.plan.name}"
            for opening, profile in zip(chosen.openings, profiles, strict=True)
            if profile is None
        ]
        found = f"not measured: no profile of {' and '.join(missing)}"
        yield note("break-even", found, f"Run {chosen.command('plan')}.")
    else:
        yield from _break_even(costs, numbers)


def _lossless(chosen: Chosen) -> Iterator[Finding]:
    """States what holds for texts with and without drafting, where a start has found it."""
    target = chosen.openings[0] if chosen.openings else None
    if target is None or target.prepared is None:
        return
    key = rows_key(
        profile_key(chosen.plan.source, target.prepared, target.plan.how), target.prepared.config
    )
    rows = ROWS.known(key)
    if rows is None:
        yield note("lossless", "found at the first start, and kept")
    else:
        yield ok("lossless", rows.lossless(chosen.plan.options.lossless_mode).describe())


def _costs(chosen: Chosen, profiles: Sequence[Profile | None]) -> Costs | None:
    """Returns the costs of passes; None unless all models that would be opened have a profile."""
    found = [profile for profile in profiles if profile is not None]
    if len(found) < len(profiles):
        return None
    costs = RowCosts({rows: found[0].costs().at(rows) for rows in _WIDTHS})
    draft_s = found[1].costs().at(1) if len(found) > 1 else 0.0
    if chosen.tokens is not None and chosen.is_retokenized:
        draft_s *= chosen.tokens.ratio  # draft tokens for each of the target's
    return Costs(costs, draft_s)


def _profile(opening: Opening) -> Profile | None:
    if opening.prepared is None:
        return None
    key = profile_key(opening.plan.source, opening.prepared, opening.plan.how)
    return load_profile(key)


def break_even(num_guesses: int, costs: Costs) -> float | None:
    """Returns the acceptance of each draft token from which a round of `num_guesses` takes no
    longer a token than plain decoding; None where not even right draft tokens pay."""

    def pays(acceptance: float) -> bool:
        draft_s = num_guesses * costs.draft_s
        return forecast_speedup([acceptance] * num_guesses, costs.rows, draft_s) >= 1

    low, high = 0.0, 1.0
    if not pays(high):
        return None
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _break_even(costs: Costs, numbers: dict[str, object]) -> Iterator[Finding]:
    step_s, share = costs.rows.at(1), costs.draft_share
    least = {count: break_even(count, costs) for count in DRAFT_TOKENS}
    numbers["break_even"] = {
        "step_ms": 1e3 * step_s,
        "draft_step_ms": 1e3 * costs.draft_s or None,
        "row_shares": {rows: costs.rows.at(rows) / step_s for rows in _WIDTHS},
        "acceptance": least,
    }
    shares = ", ".join(f"{rows} rows {costs.rows.at(rows) / step_s:.2f}" for rows in (2, 4, 8))
    drafting = f", a draft token {share:.2f}" if share else ""
    yield ok("step", f"{1e3 * step_s:.3g} ms; in steps: {shares}{drafting}")
    percents = {n: "never" if each is None else f"{each:.0%}" for n, each in least.items()}
    shown = ", ".join(f"{count}: {percents[count]}" for count in _COUNTS)
    if all(each is None for each in least.values()):
        yield warning(
            "break-even", "speculation never pays here", "Use --drafter none, or a smaller draft."
        )
    else:
        yield ok("break-even", f"right draft tokens needed, of {shown}")
    if share >= _SLOW:
        yield warning(
            "step",
            f"a step of the draft takes {share:.2f} of the target's",
            "Choose a smaller draft, or another --draft-runtime or --draft-device.",
        )


def check_memory(chosen: Chosen, numbers: dict[str, object]) -> Iterator[Finding]:
    """Checks the memory with a full context; where that does not fit, with PLANNED_TOKENS of
    text."""
    if not chosen.is_converted:
        missing = " and ".join(each.role for each in chosen.openings if each.prepared is None)
        yield note(
            "forecast",
            f"not known: the {missing} is converted for {chosen.openings[0].plan.name} first",
            f"Start it once, or run {chosen.command('plan')}.",
        )
        return
    target, *drafts = chosen.prepared
    tokens = chosen.context_length
    full = forecast(target, drafts, chosen.plan.options, tokens)
    if full is None:
        yield note("forecast", f"{target.runtime.name} does not tell what its models take")
        return
    numbers["memory"] = {
        "context_tokens": tokens,
        "models": [asdict(each) for each in full.models],
        "total_bytes": full.total,
        "free_bytes": full.free,
        "fits": full.fits,
    }
    for each in full.models:
        sizes = (each.memory.weights, each.memory.cache, each.memory.work + each.memory.library)
        weights, cache, rest = map(format_bytes, sizes)
        yield ok(each.role, f"{each.runtime}: {weights} weights, {cache} cache, {rest} beside")
    free = "what is free is not known" if full.free is None else f"{format_bytes(full.free)} free"
    together = f"{format_bytes(full.total)} with {tokens} tokens of text, {free}"
    if full.device_shortage is not None:
        together = f"{together}, {full.device_shortage}"
    few = min(tokens, PLANNED_TOKENS)
    short = forecast(target, drafts, chosen.plan.options, few)
    if full.fits:
        yield ok("together", together)
    elif short is not None and short.fits:
        yield warning(
            "together",
            f"{together}: it fits with {few} tokens, {format_bytes(short.total)}",
            f"Give --context {few}, {_SMALLER}.",
        )
    else:
        remedy = what_fits(target, drafts, chosen.plan.options, few, lambda found: found.fits)
        yield fault("together", f"{together}: it does not fit", f"Free memory. {remedy}")
