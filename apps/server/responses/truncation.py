"""Leaves out the oldest turns of a conversation that is too long."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.responses.parse import ResponsesRequest
from edge_spec.apps.server.work import Desk


def work_of(desk: Desk, request: ResponsesRequest) -> Work:
    """Returns what the request asks for, without its oldest turns where it lets them go and they do
    not fit. Raises as `Desk.chat` does."""
    work = desk.chat(request)
    if request.truncation != "auto":
        return work
    from edge_spec.apps.chat.conversation import num_to_leave_out  # brings all of the terminal

    given = request.messages
    places: list[dict[str, str]] = [
        {"role": "system" if message.role == "developer" else message.role, "place": str(place)}
        for place, message in enumerate(given)
    ]

    def ask(kept: Sequence[dict[str, str]]) -> Work:
        request.messages = [given[int(each["place"])] for each in kept]
        return desk.chat(request)

    num_left_out = num_to_leave_out(
        places,
        lambda kept: len((work if len(kept) == len(given) else ask(kept)).prompts[0]),
        desk.engine.context_length,
        max(request.limit or 0, 1),
    )
    if not num_left_out:
        return work
    opening = next(place for place, each in enumerate(places) if each["role"] != "system")
    return ask([*places[:opening], *places[opening + num_left_out :]])
