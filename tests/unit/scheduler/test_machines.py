"""What is chosen on machines that nobody here has: simulated costs and memory, each figure with its
source in fixtures/machines.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden.plans import ranking

TABLE = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "machines.json").read_text(encoding="utf-8")
)
CASES = {each["name"]: each for each in TABLE["cases"]}


def choice(case: dict[str, Any]) -> tuple[str, str | None]:
    """Return the place of the target, and of the draft that is tried there."""
    places, pairs = ranking(TABLE, case)
    best, fitting = pairs[0], "does not fit" not in pairs[0].reason
    draft = best.draft if best.can_pay and fitting else None
    return places[0].target.device, draft and draft.device


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_the_one_that_these_costs_and_this_memory_call_for(name: str) -> None:
    wanted = CASES[name]["best"]
    assert choice(CASES[name]) == (wanted["target"], wanted["draft"])


def without(name: str, *path: str, **changed: Any) -> dict[str, Any]:
    """A copy of a case in which what lies at this path is changed."""
    case = json.loads(json.dumps(CASES[name]))
    at = case
    for key in path:
        at = at[int(key) if isinstance(at, list) else key]
    at.update(changed)
    return dict(case)


@pytest.mark.parametrize(
    ("name", "path", "changed", "draft"),
    [
        # Each rule decides: what it looks at, changed, leads to another choice.
        (0, ("devices", "0"), {"free_mb": 8000}, "cuda0"),
        (2, (), {"free_mb": 9000}, "vulkan0"),
        (2, ("devices", "0"), {"shares_memory": False}, "vulkan0"),
        (3, ("costs", "270M with 262k tokens", "cpu", "ms"), {"1": 6.0, "4": 9.0}, "cpu"),
    ],
)
def test_what_decides_is_what_the_case_is_named_after(
    name: int, path: tuple[str, ...], changed: dict[str, Any], draft: str
) -> None:
    assert choice(without(list(CASES)[name], *path, **changed))[1] == draft


def test_every_figure_has_a_source() -> None:
    def figures(value: Any) -> Any:
        if isinstance(value, dict):
            if {"ms", "mb", "free_mb"} & value.keys():
                yield value
            yield from (each for part in value.values() for each in figures(part))
        elif isinstance(value, list):
            yield from (each for part in value for each in figures(part))

    found = list(figures([TABLE["models"], TABLE["cases"]]))
    sources = {each.get("source", each.get("free_source")) for each in found}
    assert len(found) > 20 and sources == set(TABLE["sources"])
