"""What is chosen on machines that nobody here has: simulated costs and memory, each figure with its
source in fixtures/machines.json."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.fitting.devices import CPU, Device
from edge_spec.fitting.forecast import DeviceMemories, FreeMemory
from edge_spec.fitting.memory import Memory
from edge_spec.placement.gains import Pair, plain_rate, with_draft
from edge_spec.placement.plan import Place, Placement
from edge_spec.placement.profile import ContextCosts, PairFindings, Profile
from edge_spec.placement.ranking import ranked
from edge_spec.placement.replay import Recording

MB = 1_000_000
TABLE = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "machines.json").read_text(encoding="utf-8")
)
CASES = {each["name"]: each for each in TABLE["cases"]}
TEXT = Recording("", (1, 2), (0,) * 1000, np.zeros((1000, 1), np.int32), np.zeros((1000, 1)))


def best_of(case: dict[str, Any]) -> Placement:
    """Ranks all pairs of places, and each place of the target alone."""
    devices = [
        Device(
            *("llamacpp", each["name"], each["kind"], "", each["free_mb"] * MB),
            free_bytes=each["free_mb"] * MB,
            shares_memory=each.get("shares_memory", False),
        )
        for each in case["devices"]
    ]
    memories = DeviceMemories(devices)
    targets, drafts = (case["costs"][case[role]] for role in ("target", "draft"))
    right = np.random.default_rng(0).random(len(TEXT.tokens)) < case["acceptance"]
    found = []
    for name, costs in targets.items():
        alone = Placement(place(name), None, "none", plain_rate(profile(costs), [TEXT]))
        found.append(with_memory(alone, memories, [(case["target"], name)]))
    for target, draft in product(targets, drafts):
        pair = Pair(
            profile(targets[target]),
            profile(drafts[draft]),
            findings(case, target, draft),
            has_devices=case.get("overlaps", True) and target != draft,
        )
        bare = Placement(place(target), place(draft), "draft-model")
        paired = with_draft(bare, pair, [TEXT], [right.tolist()])
        models = [(case["target"], target), (case["draft"], draft)]
        found.append(with_memory(paired, memories, models))
    free = FreeMemory(case["free_mb"] * MB, memories.free())
    return ranked(found, free)[0]


def with_memory(
    placement: Placement, memories: DeviceMemories, models: list[tuple[str, str]]
) -> Placement:
    main, told = 0, []
    for model, name in models:
        num_bytes = TABLE["models"][model]["mb"] * MB
        main += num_bytes if name == CPU else 0
        on_devices = {} if name == CPU else {name: num_bytes}
        told.append(("llamacpp", Memory(0, 0, 0, on_devices=on_devices)))
    needs = memories.needs(told)
    return replace(placement, memory_bytes=main + needs.main, on_devices=needs.on_devices)


def place(name: str) -> Place:
    return Place("llamacpp", name, None, "Q4_0", "1")


def profile(costs: dict[str, Any]) -> Profile:
    seconds = {int(rows): ms / 1e3 for rows, ms in costs["ms"].items()}
    return Profile((ContextCosts(256, seconds),), 1e3, 0.0, costs["row_ms"] / 1e3, 6, 0.0)


def findings(case: dict[str, Any], target: str, draft: str) -> PairFindings | None:
    found = case.get("pairs", {}).get(f"{target} {draft}")
    if found is None:
        return None
    return PairFindings(found["switch_ms"] / 1e3, found["target_slowdown"], found["draft_slowdown"])


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_the_one_that_these_costs_and_this_memory_call_for(name: str) -> None:
    case, wanted = CASES[name], CASES[name]["best"]
    best = best_of(case)
    assert best.target.device == wanted["target"]
    assert (best.draft and best.draft.device) == wanted["draft"]
    assert best.overlapped == wanted.get("overlapped", False)
    if wanted["tokens"] is not None:
        least, most = wanted["tokens"]
        assert best.draft_tokens is not None and least <= best.draft_tokens <= most


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
        (4, (), {"pairs": {}}, "gpu"),
        (6, (), {"pairs": {}}, "cpu"),
        (8, ("costs", "270M with 262k tokens", "cpu", "ms"), {"1": 9.0, "2": 10.0}, "cpu"),
    ],
)
def test_what_decides_is_what_the_case_is_named_after(
    name: int, path: tuple[str, ...], changed: dict[str, Any], draft: str
) -> None:
    best = best_of(without(list(CASES)[name], *path, **changed))
    assert best.draft is not None and best.draft.device == draft


def test_every_figure_has_a_source() -> None:
    def figures(value: Any) -> Any:
        if isinstance(value, dict):
            if {"ms", "mb", "switch_ms", "free_mb"} & value.keys():
                yield value
            yield from (each for part in value.values() for each in figures(part))
        elif isinstance(value, list):
            yield from (each for part in value for each in figures(part))

    found = list(figures([TABLE["models"], TABLE["cases"]]))
    sources = {each.get("source", each.get("free_source")) for each in found}
    assert len(found) > 20 and sources == set(TABLE["sources"])
