"""What `plan` ranks first and `doctor` says, on machines and measurements that are made up.

Nothing is measured: times and free memory are given, and kept in a cache of its own
where a decision reads them there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.drafters import factory
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.devices import CPU, Device, Memory
from edge_spec.models.memory import MAIN, Forecast, ModelMemory, by_label, room
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Place
from edge_spec.placement.plan import Placement, pair_step_s, rank_places
from edge_spec.scheduler.engine_plan import choose_plan, plan_engine, plans_for, widest_cheap
from edge_spec.scheduler.priors import OWN_KERNELS
from edge_spec.scheduler.profile import Profile, profile_key, save_profile
from fixtures import tiny_models
from fixtures.silence import quiet

MB = 1_000_000
MACHINES = Path(__file__).parents[1] / "fixtures" / "machines.json"

CHEAP_ROWS = {1: 1.0, 2: 1.03, 4: 1.16, 8: 1.8, 16: 3.2}  # times of a plain step
DEAR_ROWS = {1: 1.0, 2: 1.9, 4: 3.2, 8: 5.5, 16: 11.0}
GPU_ROWS = {1: 1.0, 2: 1.01, 4: 1.02, 8: 1.05, 16: 1.12}


def record() -> dict[str, Any]:
    """Return the decisions by kind and case, where rows cost what is usual of our kernels."""

    def usual(kernels: str, device: str) -> Mapping[int, float]:
        return OWN_KERNELS

    with (
        TemporaryDirectory() as folder,
        patch("edge_spec.scheduler.row_findings.row_shares", usual),
    ):
        here = Path(folder)
        return {
            "rankings of pairs": dict(_machines()),
            "rankings of places": dict(_places()),
            "default drafters": dict(_default_drafters()),
            "plans in use": dict(_plans_in_use(here / "plans")),
            "doctor": dict(_doctor(here / "doctor")),
        }


@contextmanager
def _empty_cache(folder: Path) -> Iterator[None]:
    with patch.dict(os.environ, {"EDGE_SPEC_CACHE": str(folder)}):
        yield


def _told(placements: Sequence[Placement]) -> list[dict[str, Any]]:
    """Return the order of placements, with the reason why each is not the first."""
    return [
        {
            "target": f"{each.target.runtime} {each.target.device}",
            "draft": each.draft and f"{each.draft.runtime} {each.draft.device}",
            "drafter": "draft-model" if each.draft else "none",
            "reason": each.reason,
        }
        for each in placements
    ]


# Pairs of models on machines with several devices.


def _machines() -> Iterator[tuple[str, Any]]:
    table = json.loads(MACHINES.read_text(encoding="utf-8"))
    for case in table["cases"]:
        short = {**case, "free_mb": 300}
        short["devices"] = [{**each, "free_mb": 300} for each in case["devices"]]
        changed = {"": case, "; 300 MB free everywhere": short}
        for name, each in changed.items():
            places, pairs = ranking(table, each)
            told = {"places": _told(places), "pairs": _told(pairs)}
            yield f"{case['name']}{name}", told


def ranking(table: Any, case: Any) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Rank the places of the target, and those of the draft beside its best one."""
    devices = [
        Device(
            *("llamacpp", each["name"], each["kind"], "", each["free_mb"] * MB),
            free_bytes=each["free_mb"] * MB,
            shares_memory=each.get("shares_memory", False),
        )
        for each in case["devices"]
    ]
    labelled = by_label(devices)

    def sized(placement: Placement, *models: tuple[str, str]) -> Placement:
        main, told = 0, []
        for model, name in models:
            num_bytes = table["models"][model]["mb"] * MB
            main += num_bytes if name == CPU else 0
            own = {} if name == CPU else {name: num_bytes}
            told.append(ModelMemory("", model, "llamacpp", Memory(0, 0, 0, on_devices=own)))
        needs = Forecast(tuple(told), None, labelled).needs
        return replace(placement, memory_bytes=main + needs.pop(MAIN), on_devices=needs)

    target, draft = case["target"], case["draft"]
    free = room(case["free_mb"] * MB, labelled)
    alone = []
    for name, costs in case["costs"][target].items():
        step_s = _of_table(costs).seconds[1]
        plain = Placement(_place("llamacpp", name), step_s=step_s)
        alone.append(sized(plain, (target, name)))
    places = rank_places(alone, free)
    best = places[0]
    pairs = []
    for name in case["costs"][draft]:
        on = best.target.device
        placement = replace(best, draft=_place("llamacpp", name))
        costs = (_of_table(case["costs"][model][at]) for model, at in ((target, on), (draft, name)))
        placement = replace(placement, pair_step_s=pair_step_s(*costs))
        pairs.append(sized(placement, (target, on), (draft, name)))
    return places, rank_places(pairs, free)


def _of_table(costs: Any) -> Profile:
    seconds = {int(rows): ms / 1e3 for rows, ms in costs["ms"].items()}
    copied = {rows: each + rows * costs["row_ms"] / 1e3 for rows, each in seconds.items()}
    return Profile(copied, rounds=6, spread=0.0)


# One model at several places, with drafters that need no second one.


def _place(runtime: str, device: str = "cpu") -> Place:
    return Place(runtime, device, None, "int4 block 32")


def _places() -> Iterator[tuple[str, Any]]:
    def at(runtime: str, step_s: float | None = 0.01, **more: Any) -> Placement:
        device = more.pop("device", "cpu")
        found = Placement(_place(runtime, device), step_s=step_s, memory_bytes=100 * MB)
        return replace(found, **more)

    gpu = at("llamacpp", 0.004, device="cuda0")
    busy = at("llamacpp", 0.03, device="cuda0")
    slow, fast = at("ort", 0.02), at("llamacpp", 0.005)
    cases = {
        "one place": [fast],
        "two runtimes": [slow, fast],
        "a GPU beside a processor": [slow, fast, gpu],
        "a busy GPU beside a processor": [fast, busy],
        "within noise": [at("llamacpp", 0.0101), at("ort")],
        "equal": [at("ort"), at("llamacpp")],
        "the fastest does not fit": [replace(fast, memory_bytes=600 * MB), slow],
        "nothing fits": [
            replace(fast, memory_bytes=600 * MB),
            replace(slow, memory_bytes=700 * MB),
        ],
        "one was not measured": [at("ort", None), slow, fast],
        "nothing was measured": [at("ort", None), at("llamacpp", None)],
        "the fastest loses what weights say": [replace(fast, loss=0.2), replace(slow, loss=0.0)],
        "the fastest loses little": [replace(fast, loss=0.004), replace(slow, loss=0.0)],
    }
    for name, placements in cases.items():
        yield name, _told(rank_places(placements, {MAIN: 500 * MB}))
    yield "free memory is not known", _told(rank_places(cases["nothing fits"], {}))


def _profile(step_s: float, rows: dict[int, float]) -> Profile:
    costs = {width: step_s * times for width, times in rows.items()}
    return Profile(costs, rounds=5, spread=0.0)


def _default_drafters() -> Iterator[tuple[str, str]]:
    tables = {"cheap": CHEAP_ROWS, "dear": DEAR_ROWS, "gpu": GPU_ROWS}
    for (name, rows), step_ms in product(tables.items(), (1, 5, 50)):
        cheap = widest_cheap(_profile(step_ms / 1e3, rows).costs())
        names = factory.auto_drafters(drafts=False, corpora=False, cheap_rows=cheap)
        yield f"{name} rows, {step_ms} ms", ",".join(names)


# Places that `edge-spec plan` has measured, when a model is opened.


def _plans_in_use(folder: Path) -> Iterator[tuple[str, Any]]:
    folder.mkdir()
    target, draft = (
        Source(str(tiny_models.write_gguf(model, folder / f"{name}.gguf")), quiet)
        for name, model in (
            ("target", tiny_models.build("llama")),
            ("draft", tiny_models.build("llama", num_hidden_layers=1)),
        )
    )
    unasked, plain = RuntimeOptions(), RuntimeOptions(providers=("cpu",))
    few, gpu = replace(plain, threads=1), RuntimeOptions(providers=("cuda0",))
    pair = {"draft": (draft.model,)}
    cases: dict[str, tuple[list[tuple[Source, RuntimeOptions, float]], dict[str, Any]]] = {
        "nothing was measured": ([], {}),
        "the usual place": ([(target, unasked, 0.01)], {}),
        "as it is named, no faster": ([(target, unasked, 0.01), (target, plain, 0.0098)], {}),
        "fewer threads are faster": ([(target, plain, 0.01), (target, few, 0.008)], {}),
        "fewer threads are slower": ([(target, plain, 0.01), (target, few, 0.012)], {}),
        "a device is faster": ([(target, plain, 0.01), (target, gpu, 0.002)], {}),
        "a device is slower": ([(target, plain, 0.01), (target, gpu, 0.02)], {}),
        "a drafter is asked for": ([(target, gpu, 0.002)], {"drafter": "none"}),
        "a runtime is asked for": ([(target, gpu, 0.002)], {"runtime": "llamacpp"}),
        "threads are asked for": ([(target, gpu, 0.002)], {"threads": 1}),
        "exact texts are asked for": ([(target, gpu, 0.002)], {"exact": True}),
        "a pair": ([(target, gpu, 0.002), (draft, few, 0.001)], pair),
        "a pair whose draft is fastest as it is": (
            [(draft, plain, 0.001), (draft, few, 0.1)],
            pair,
        ),
        "a pair with a drafter": ([(target, gpu, 0.002)], {**pair, "drafter": "cascade"}),
    }
    for number, (name, (measured, asked)) in enumerate(cases.items()):
        with _empty_cache(folder / str(number)):
            for source, how, step_s in measured:
                prepared = ModelPlan(source, "llamacpp", how).find()
                assert prepared is not None
                save_profile(profile_key(source, prepared), _profile(step_s, CHEAP_ROWS))
            plans = plan_engine(target, LoadOptions(**asked))
            first = plans[0]
            told = {
                "targets": [_where(each.target) for each in plans],
                "drafts": [_where(each) for each in first.drafts],
                "drafter": first.drafter,
            }
        yield name, told


def _where(plan: ModelPlan) -> str:
    threads = "" if plan.how.threads is None else f", {plan.how.threads} threads"
    return f"{plan.name} {','.join(plan.how.providers)}{threads}"


# What doctor says of it.


def _doctor(folder: Path) -> Iterator[tuple[str, Any]]:
    folder.mkdir()
    paths = {}
    for name, layers in (("target", 8), ("draft", 1), ("large", 8)):
        model = tiny_models.build("llama", num_hidden_layers=layers)
        checkpoint = open_checkpoint(tiny_models.write_hf(model, folder / f"{name} checkpoint"))
        paths[name] = folder / name
        OnnxExporter().export(checkpoint, paths[name], ExportOptions("fp32", check=False), quiet)
    cases: dict[str, dict[str, Any]] = {
        "nothing is measured": {},
        "nothing is measured, alone": {"draft": None},
        "alone": {"draft": None, "times": (0.01,)},
        "alone, dear rows": {"draft": None, "times": (0.01,), "rows": DEAR_ROWS},
        "a large draft": {"draft": "large", "times": (0.01, 0.01)},
        "a cheap draft": {"times": (0.01, 0.001)},
        "a dear draft": {"times": (0.01, 0.006)},
        "a draft slower than its target": {"times": (0.01, 0.02)},
        "a cheap draft, dear rows": {"times": (0.01, 0.001), "rows": DEAR_ROWS},
    }
    for number, (name, case) in enumerate(cases.items()):
        with _empty_cache(folder / f"cache{number}"):
            yield name, _examined(paths, folder, **case)


def _examined(
    paths: dict[str, Path],
    folder: Path,
    draft: str | None = "draft",
    times: tuple[float, ...] = (),
    rows: dict[int, float] = CHEAP_ROWS,
) -> dict[str, Any]:
    asked = AskedOptions(draft=None if draft is None else str(paths[draft]))
    plan, _ = choose_plan(plans_for(Source(str(paths["target"]), quiet), asked))
    for each, step_s in zip((plan.target, *plan.drafts), times, strict=False):
        prepared = each.find()
        assert prepared is not None
        key = profile_key(each.source, prepared)
        save_profile(key, _profile(step_s, rows))
    devices = [Device("ort", "cpu", "cpu", "the processor")]
    report = diagnose(str(paths["target"]), asked, quiet, devices=lambda: devices)
    return {
        "lines": [
            [
                *(each.group, each.check, each.level.value),
                *(text.replace(str(folder), "FOLDER") for text in (each.found, each.remedy)),
            ]
            for each in report.findings
            if each.group in ("pair", "speed")
        ],
    }
