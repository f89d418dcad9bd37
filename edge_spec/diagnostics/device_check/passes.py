"""Times passes, and checks that the clock is read when the device is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.device_check.request import DeviceCheckRequest
from edge_spec.diagnostics.device_check.sessions import ELSEWHERE
from edge_spec.diagnostics.doctor.finding import Finding, judged, ok
from edge_spec.placement.measure import Effort, measure

_EFFORT = Effort(max_s=30.0, min_rounds=2)
_ROUNDS, _PROMPT_TOKENS, _ROWS = 8, 128, 4
# Of a round's time, the pass. Less is outside of it: the device was not done when it was timed, or
# keeping rows takes as long as scoring them.
_LEAST_SHARE = 0.5
_COARSE_S = 1e-4  # rounds shorter than that tell nothing of a device


def check_passes(request: DeviceCheckRequest, effort: Effort = _EFFORT) -> Iterator[Finding]:
    with request.opened() as model:
        yield from judge_clock(model)
        profile = measure(model, effort, lambda fraction: None)
    for costs in profile.contexts:
        pass_ms = {str(rows): 1e3 * each for rows, each in costs.seconds.items()}
        shown = ", ".join(f"{rows}: {each:,.3g}" for rows, each in pass_ms.items())
        found = f"at {costs.context_tokens} tokens, rows: ms {shown}"
        yield ok("passes", found, context_tokens=costs.context_tokens, pass_ms=pass_ms)
    yield ok(
        "passes",
        f"{profile.prefill_tokens_per_s:,.0f} tokens/s of a prompt; certain to "
        f"{profile.spread:.0%} after {profile.rounds} rounds",
        prompt_tokens_per_s=profile.prefill_tokens_per_s,
        spread=profile.spread,
    )


def judge_clock(model: Model, clock: Callable[[], float] = time.perf_counter) -> Iterator[Finding]:
    """Times rounds as a whole beside their parts: what a part leaves to the next one shows."""
    rows = min(_ROWS, model.capabilities.max_rows)
    prompt = min(_PROMPT_TOKENS, max(1, model.config.context_length - 2 * rows))
    drawn = np.random.RandomState(0).randint(0, model.config.vocab_size, prompt + rows).tolist()
    chain = TokenTree.chain(drawn[prompt], drawn[prompt + 1 :])
    times: list[tuple[float, ...]] = []
    with closing(model.open_session()) as session:
        for _ in range(_ROUNDS + 1):
            at = [clock()]
            session.prefill(drawn[:prompt])
            at.append(clock())
            session.forward(chain).logits.copy()
            at.append(clock())
            session.commit([0])
            session.rollback(prompt)
            start = clock()
            session.forward(chain)
            passed = clock()
            session.commit([0])
            session.rollback(prompt)
            session.forward(chain).logits.copy()  # waits for whatever is left to do
            # Two passes and what lies between.
            whole = (clock() - start) / 2
            session.rollback(0)
            times.append((whole, passed - start, at[1] - at[0], at[2] - at[1]))
    # The first round binds buffers.
    round_s, pass_s, prefill_s, first_s = (median(each) for each in zip(*times[1:], strict=True))
    yield judged(
        "clock",
        pass_s >= _LEAST_SHARE * round_s or round_s < _COARSE_S,
        f"a pass takes {1e3 * pass_s:,.3g} of a round's {1e3 * round_s:,.3g} ms",
        f"Passes end before the device is done. {ELSEWHERE}",
    )
    late_s = first_s - round_s
    yield judged(
        "clock",
        late_s <= max(prefill_s, _COARSE_S),
        f"a prompt takes {1e3 * prefill_s:,.3g} ms, the pass after it {1e3 * first_s:,.3g} ms",
        f"Reading ends before the device is done. {ELSEWHERE}",
    )
