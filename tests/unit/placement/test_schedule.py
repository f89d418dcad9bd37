"""What is told to be left of a plan."""

from __future__ import annotations

from edge_spec.placement.schedule import Schedule


def test_what_is_left_counts_down_by_the_clock_and_by_stages() -> None:
    now = [0.0]
    told: list[str] = []
    stages = {"survey": 20.0, "record": 10.0, "trial": 5.0}
    schedule = Schedule(lambda what, fraction: told.append(what), stages, lambda: now[0])
    schedule.enter("survey")
    for now[0] in (0.0, 12.0, 30.0):  # it takes longer than was thought
        schedule("Measuring", 0.5)
    schedule.enter("record")
    schedule("Recording", 0.0)
    schedule.enter("trial")  # what was to come before it is done
    now[0] += 4.0
    schedule("Trying", 0.0)
    left = [35, 23, 15, 15, 1]
    assert told == [
        f"{what} (the plan takes about {s} s more)"
        for what, s in zip(["Measuring"] * 3 + ["Recording", "Trying"], left, strict=True)
    ]
