"""Which prompt is read next beside the rounds of others, and how many of its tokens at once.

A slice makes a pass at most so many times as long as it usually is for those who write (Agrawal et
al. 2024, Sarathi-Serve); a short prompt is read at once, which holds them up only once and less
than its slices would, since fewer passes read the weights. What is usual is learnt from passes
without slices, of which there is one now and then; what a token of a prompt takes from its own
slices, since it attends to all before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.control.pass_times import SharingTimes
from edge_spec.engine.pass_requests import PromptRequest, Request

LEAST_SLICE = 4  # tokens, that others leave room for
MOST_ALONE = 256  # tokens at once, where nobody writes: so long those wait who come then
_LONGER = 2.0  # how many times as long a slice may make the passes of others
_LONGER_WHOLE = 4.0  # likewise, where it is a whole prompt
_PAUSE = 16  # passes of others, of which one has no slice


class PromptSlices:
    """One thread at a time may use it."""

    def __init__(self, times: SharingTimes) -> None:
        self._times = times
        self._token_s: float | None = None  # of the last slice of any prompt
        self._num_turns = 0
        self._num_passes = 0

    def in_turn(self, queue: Sequence[Request]) -> list[Request]:
        """Returns the queue with the prompt that is next before the others: in turns the one that
        is soonest read, so that its answer begins, and the one that came first, so that none
        waits for ever."""
        prompts = [request for request in queue if isinstance(request, PromptRequest)]
        if len(prompts) < 2:
            return list(queue)
        self._num_turns += 1
        if self._num_turns % 2:
            chosen = min(prompts, key=lambda prompt: prompt.arrived_s)
        else:
            chosen = min(prompts, key=lambda prompt: (prompt.num_left, prompt.arrived_s))
        prompts.remove(chosen)
        ordered = iter([chosen, *prompts])
        return [next(ordered) if isinstance(each, PromptRequest) else each for each in queue]

    def pauses(self) -> bool:
        """Counts a pass in which others and prompts could be; whether it goes without prompts."""
        self._num_passes += 1
        return self._num_passes % _PAUSE == 0

    def take(
        self, prompts: Sequence[PromptRequest], rows: int, usual_rows: float, room: int
    ) -> tuple[list[PromptRequest], bool]:
        """Takes slices of these prompts for a pass with so many `rows` of others, the first one's
        in any case. Returns whose, and whether more than `room` tokens would have been right."""
        times = self._times.all
        usual_s = times.at(max(rows, usual_rows))
        left_s = _LONGER * usual_s - times.at(rows)
        whole_s = _LONGER_WHOLE * usual_s - times.at(rows)
        taken: list[PromptRequest] = []
        for prompt in prompts:
            token_s = prompt.token_s or self._token_s or times.row_s
            fitting = int(left_s / token_s) if token_s > 0 else 0
            if not taken:
                fitting = max(LEAST_SLICE, fitting)
                if not prompt.is_begun and 0 < prompt.num_left * token_s <= whole_s:
                    fitting = prompt.num_left
            if fitting <= 0 or room <= 0:
                break
            prompt.take(min(fitting, room))
            taken.append(prompt)
            if fitting > room and prompt.num_left > room:
                return taken, True
            left_s -= prompt.num_rows * token_s
            room -= prompt.num_rows
        return taken, False

    def observe(
        self, prompts: Sequence[PromptRequest], scored: int, read: int, seconds: float
    ) -> None:
        """A pass has read so many tokens of these, beside so many scored rows."""
        for prompt in prompts:
            known_s = prompt.token_s or self._token_s
            prompt.token_s = self._times.observe_slices(scored, read, seconds, known_s)
        self._token_s = prompts[-1].token_s
