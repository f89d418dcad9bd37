"""Says whether speculation pays: from which acceptance on, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edge_spec.control.cost import RowCosts, forecast_speedup
from edge_spec.control.regret import FIRST
from edge_spec.diagnostics.doctor.chosen import Chosen, Opening
from edge_spec.diagnostics.doctor.finding import Finding, note, ok, warning
from edge_spec.drafters.factory import auto_drafters
from edge_spec.errors import ModelFileError
from edge_spec.models.pair_history import PairHistory, check_history, history_path
from edge_spec.placement.gains import pass_costs
from edge_spec.placement.profile import TYPICAL_TOKENS, Profile, load_profile, profile_key, read_key
from edge_spec.placement.row_findings import known_rows, rows_key

DRAFT_TOKENS = range(1, 9)
_WIDTHS = range(1, DRAFT_TOKENS[-1] + 2)  # rows of the passes that verify them
_SHOWN = (1, 2, 4, 8)
_MIN_ROUNDS = 100  # with a draft token, before use tells anything
_SLOW = 1.0  # steps of the target that one of the draft takes
_PRECISION = 1e-4
_NO_GAIN = 1.02  # times plain decoding: what rounds differ by anyway
_WHERE = f"is asked in rounds where that pays; a text loses about {FIRST:g} plain steps at most"


class Costs(NamedTuple):
    """Holds the costs of one round: passes by rows, and what one draft token takes; 0 where it is
    looked up in text."""

    rows: RowCosts
    draft_s: float

    @property
    def draft_share(self) -> float:
        """Of a plain step."""
        return self.draft_s / self.rows.at(1)


def check_speed(chosen: Chosen, numbers: dict[str, object]) -> Iterator[Finding]:
    """Nothing is measured here: what profiles, plans and use have left."""
    yield from _drafting(chosen)
    yield from _lossless(chosen)
    profiles = [_profile(each) for each in chosen.openings]
    costs = _costs(chosen, profiles)
    if costs is None:
        missing = [
            f"the {opening.role} on {opening.runtime}"
            for opening, profile in zip(chosen.openings, profiles, strict=True)
            if profile is None
        ]
        found = f"not measured: no profile of {' and '.join(missing)}"
        yield note("break-even", found, f"Run {chosen.plan_command}.")
    else:
        yield from _break_even(costs, numbers)
    yield from _expected(chosen, costs, numbers)


def _drafting(chosen: Chosen) -> Iterator[Finding]:
    """Names who drafts, so that no draft is inactive unnoticed."""
    if chosen.head:
        yield ok("drafter", f"{_named(chosen)}: the head {_WHERE}")
    elif chosen.asked is None:
        yield ok("drafter", f"{_named(chosen)}; no draft was named")
    elif not chosen.options.drafts:
        yield warning(
            "drafter",
            f"the draft would not be used: the plan of this pair found {chosen.options.drafter} "
            "faster",
            f"Measure again: {chosen.plan_command} --refresh; or insist: --drafter draft-model.",
        )
    else:
        yield ok("drafter", f"{_named(chosen)}: the draft {_WHERE}")


def _lossless(chosen: Chosen) -> Iterator[Finding]:
    """States what holds for texts with and without drafting, where a start has found it."""
    target = chosen.openings[0] if chosen.openings else None
    if target is None or target.prepared is None:
        return
    key = rows_key(
        profile_key(chosen.source, target.prepared, target.options), target.prepared.config
    )
    rows = known_rows(key)
    if rows is None:
        yield note("lossless", "found at the first start, and kept")
    else:
        yield ok("lossless", rows.lossless(chosen.options.lossless_mode).describe())


def _named(chosen: Chosen) -> str:
    if chosen.options.drafter != "auto":
        return chosen.options.drafter
    return ",".join(
        auto_drafters(drafts=bool(chosen.options.drafts), corpora=False, head=chosen.head)
    )


def _costs(chosen: Chosen, profiles: Sequence[Profile | None]) -> Costs | None:
    """Returns the costs of passes; None unless all models that would be opened have a profile."""
    found = [profile for profile in profiles if profile is not None]
    if len(found) < len(profiles):
        return None
    pass_s = pass_costs(found[0])
    costs = RowCosts({rows: pass_s(rows, TYPICAL_TOKENS) for rows in _WIDTHS})
    draft_s = pass_costs(found[1])(1, TYPICAL_TOKENS) if len(found) > 1 else 0.0
    return Costs(costs, draft_s * chosen.draft_tokens)


def _profile(opening: Opening) -> Profile | None:
    """A damaged one is left where it is: the check of the caches names it."""
    if opening.prepared is None:
        return None
    key = profile_key(opening.source, opening.prepared, opening.options)
    try:
        read_key(key.path)
    except FileNotFoundError:  # one may have come with the model
        pass
    except (ModelFileError, OSError):
        return None
    return load_profile(key, opening.prepared.profiles)


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
    shown = ", ".join(f"{count}: {percents[count]}" for count in _SHOWN)
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


def _expected(chosen: Chosen, costs: Costs | None, numbers: dict[str, object]) -> Iterator[Finding]:
    expected: dict[str, object] = {"plan": None, "use": None}
    numbers["speedup"] = expected
    if chosen.placement is not None:
        expected["plan"] = chosen.placement.speedup
        speedup, share = chosen.placement.speedup, chosen.placement.acceptance
        found = "" if speedup is None else f", {speedup:.2f} times plain decoding"
        found += "" if share is None else f", {share:.0%} accepted"
        yield ok("plan", f"{chosen.placement}{found}")
    elif chosen.plan is not None:
        yield note(
            "plan",
            f"not used here now: {chosen.plan.placements[0]}",
            f"Free memory, or make it again: {chosen.plan_command}.",
        )
    history = _history(chosen)
    rounds, right = (0, 0) if history is None else history.first_draft_tokens
    if rounds >= _MIN_ROUNDS:
        acceptance = right / rounds
        expected["acceptance"] = acceptance
        found = f"the first draft token was right in {acceptance:.0%} of {rounds} rounds"
        if costs is not None and chosen.options.drafts:
            expected["use"] = gain = expected_speedup(acceptance, costs)
            found += f": about {gain:.2f} times plain decoding, if the others are right as often"
        yield ok("use", found)
        if costs is not None and costs.draft_s and expected_speedup(acceptance, costs) <= _NO_GAIN:
            found = f"the draft gains nothing at that: a draft token takes {costs.draft_share:.2f}"
            remedy = "Choose a smaller draft, one that is right more often, or --draft none."
            yield warning("use", f"{found} of a step", remedy)
    # Without costs the remedy is the same, but for a draft that no plan knows.
    is_told = costs is None and not chosen.is_retokenized
    if chosen.plan is None and rounds < _MIN_ROUNDS and not is_told:
        yield note("expected", "not measured here", f"Run {chosen.trial_command}.")


def _history(chosen: Chosen) -> PairHistory | None:
    """A damaged one, which opening it would remove, is left where it is."""
    if chosen.asked is None:
        return None
    path = history_path(chosen.source, chosen.asked)
    try:
        check_history(path)
    except (ModelFileError, OSError):  # there is none, or the check of the caches names it
        return None
    return PairHistory(path)


def expected_speedup(acceptance: float, costs: Costs) -> float:
    """Forecasts the speedup with the best number of draft tokens, or none."""
    return max(
        1.0,
        *(
            forecast_speedup([acceptance] * count, costs.rows, count * costs.draft_s)
            for count in DRAFT_TOKENS
        ),
    )
