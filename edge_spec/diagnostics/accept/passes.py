"""What passes take on the device: t(k), reading a prompt, commits and copies, and whether the clock
is read when the device is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline, OutOfTimeError, TimedModel
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, judged, out_of_time, passed
from edge_spec.placement.measure import Effort, measure
from edge_spec.placement.profile import Profile

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
# Tokens, as far as the model's context allows, and their share of the time. What comes on top, the
# first passes of each, is not counted in it.
CONTEXTS = MappingProxyType({32: 0.15, 1024: 0.2, 8192: 0.4})
_ROUNDS, _PROMPT_TOKENS, _ROWS = 8, 128, 4
# Of a round's time, the pass. Less is outside of it: the device was not done when it was timed, or
# keeping rows takes as long as scoring them.
_LEAST_SHARE = 0.5
_COARSE_S = 1e-4  # rounds shorter than that tell nothing of a device
Clock = Callable[[], float]


class Rounds(NamedTuple):
    """Seconds, medians: of a whole round, of the pass in it, of a prefill, and of the first pass
    after it beyond a later one."""

    round_s: float
    pass_s: float
    prefill_s: float
    after_prefill_s: float


def check_passes(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """One context after the other, so that what was measured stays where the next one is too
    long."""
    with request.opened() as opened:
        model = TimedModel(opened, deadline)
        yield from judge_rounds(measure_rounds(model))
        seconds, profile = deadline.left_s, None
        limit = model.config.context_length - min(WIDTHS[-1], model.capabilities.max_rows)
        shares = {max(1, min(tokens, limit)): share for tokens, share in CONTEXTS.items()}
        try:
            for tokens, share in shares.items():
                effort = Effort(share * seconds, min_rounds=2, widths=WIDTHS, contexts=(tokens,))
                profile = measure(model, effort, lambda fraction: None)
                yield describe_context(profile)
        except OutOfTimeError as error:
            yield out_of_time(f"t(k) at {tokens} tokens", str(error))
    if profile is not None:
        yield describe_rest(profile)


def measure_rounds(model: Model, clock: Clock = time.perf_counter) -> Rounds:
    """Times rounds as a whole beside their parts: what a part leaves to the next one shows."""
    limit = model.config.context_length
    prompt = min(_PROMPT_TOKENS, max(1, limit - 2 * _ROWS))
    rows = min(_ROWS, model.capabilities.max_rows)
    drawn = np.random.RandomState(0).randint(0, model.config.vocab_size, prompt + rows).tolist()
    chain = TokenTree.chain(drawn[prompt], drawn[prompt + 1 :])
    whole, passes, prefills, first = [], [], [], []
    with closing(model.open_session()) as session:
        for done in range(_ROUNDS + 1):  # the first one binds buffers
            began = clock()
            session.prefill(drawn[:prompt])
            read = clock()
            session.forward(chain).logits.copy()
            scored = clock()
            session.commit([0])
            session.rollback(prompt)
            start = clock()
            session.forward(chain)
            timed = clock()
            session.commit([0])
            session.rollback(prompt)
            session.forward(chain).logits.copy()  # waits for whatever is left to do
            end = clock()
            session.rollback(0)
            if done:
                prefills.append(read - began)
                first.append(scored - read)
                passes.append(timed - start)
                whole.append((end - start) / 2)  # two passes and what lies between
    late = median(first) - median(whole)
    return Rounds(median(whole), median(passes), median(prefills), max(0.0, late))


def judge_rounds(rounds: Rounds) -> Iterator[CheckRow]:
    share = rounds.pass_s / rounds.round_s if rounds.round_s > 0 else 1.0
    yield judged(
        "clock of passes",
        share >= _LEAST_SHARE or rounds.round_s < _COARSE_S,
        f"a pass of {_ROWS} rows takes {_ms(rounds.pass_s)} of a round's {_ms(rounds.round_s)}"
        + ("" if share >= _LEAST_SHARE else ": it ends before the device is done"),
        pass_ms=1e3 * rounds.pass_s,
        round_ms=1e3 * rounds.round_s,
    )
    late = rounds.after_prefill_s > max(rounds.prefill_s, _COARSE_S)
    yield judged(
        "clock of prompts",
        not late,
        f"{_PROMPT_TOKENS} tokens are read in {_ms(rounds.prefill_s)}, and the pass after that "
        f"takes {_ms(rounds.after_prefill_s)} more"
        + (": reading ends before the device is done" if late else ""),
        prefill_ms=1e3 * rounds.prefill_s,
        after_prefill_ms=1e3 * rounds.after_prefill_s,
    )


def describe_context(profile: Profile) -> CheckRow:
    (costs,) = profile.contexts
    shown = ", ".join(f"{rows}: {1e3 * each:,.3g}" for rows, each in costs.seconds.items())
    return passed(
        f"t(k) at {costs.context_tokens} tokens",
        f"rows: ms {shown}; certain to {profile.spread:.0%} after {profile.rounds} rounds",
        context_tokens=costs.context_tokens,
        pass_ms={str(rows): 1e3 * each for rows, each in costs.seconds.items()},
        spread=profile.spread,
        rounds=profile.rounds,
    )


def describe_rest(profile: Profile) -> CheckRow:
    return passed(
        "prompt, commit, copy",
        f"{profile.prefill_tokens_per_s:,.0f} tokens/s of a prompt; a commit takes "
        f"{_ms(profile.commit_s)}, a row of scores {_ms(profile.logits_row_s)} to copy",
        prompt_tokens_per_s=profile.prefill_tokens_per_s,
        commit_ms=1e3 * profile.commit_s,
        logits_row_ms=1e3 * profile.logits_row_s,
    )


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
