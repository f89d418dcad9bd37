"""One client's answers to prompts of several kinds, of servers in turns."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from serve_clients import Answer, Server, ask
from serve_table import in_turns

from edge_spec.diagnostics.bench.report import Interval, Paired, joined, prompt_speedups, speedup

PLAIN = "plain"  # the arm whose texts ours are held against
_LONG = 60  # tokens: the rate of a shorter answer is noise
_POSITIONS = 4
_WARM_UP = ("Count from one to twenty.", "Name five rivers and five towns that lie on them.")
_WARM_UP_TOKENS = 24
_BY_POSITION = re.compile(
    r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', re.M
)
_ROUNDS = re.compile(r"^llamacpp:spec_decode_num_drafts_total (\d+)", re.M)

Opens = Callable[[], AbstractContextManager[Server]]
Entry = dict[str, Any]  # one answer, as it is kept
Document = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Says what is asked. tokens: of an answer. seconds: after which no further prompt is begun;
    0: none is. kept: JSON lines of the answers, which another run goes on with."""

    prompts: Sequence[Mapping[str, str]]
    tokens: int
    repeats: int
    seconds: float | None
    kept: Path | None

    def rows(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Passes over all prompts, since who answered one a moment ago may know the answer. Kinds
        take turns, so that there are some of each where the time ends."""
        seen: Counter[str] = Counter()
        places = []
        for prompt in self.prompts:
            places.append(seen[prompt["category"]])
            seen[prompt["category"]] += 1
        order = sorted(range(len(places)), key=places.__getitem__)
        for repeat in range(self.repeats):
            yield from ((repeat, self.prompts[index]) for index in order)


def measure(opens: Mapping[str, Opens], plan: Plan) -> list[Entry]:
    """Returns the answers of all arms to each prompt, and to none that an arm lacks."""
    entries = _read(plan.kept)
    have = {_key(entry) for entry in entries}
    wanted = [
        (repeat, prompt)
        for repeat, prompt in plan.rows()
        if not all((arm, repeat, prompt["id"]) in have for arm in opens)
    ]
    if wanted and plan.seconds != 0:
        with ExitStack() as opened:
            servers = {arm: opened.enter_context(open_()) for arm, open_ in opens.items()}
            for server in servers.values():
                for text in _WARM_UP:
                    asyncio.run(ask(server, text, _WARM_UP_TOKENS))
            ends = time.monotonic() + (plan.seconds or inf)
            for number, (repeat, prompt) in enumerate(wanted):
                if time.monotonic() > ends:
                    break
                for arm, server in in_turns(list(servers.items()), number):
                    if (arm, repeat, prompt["id"]) not in have:
                        entry = _answer(server, prompt, plan.tokens)
                        entries.append({"arm": arm, "repeat": repeat, **entry})
                        _keep(plan.kept, entries[-1])
    complete = Counter(key[1:] for key in {_key(entry) for entry in entries} if key[0] in opens)
    return [
        entry
        for entry in entries
        if entry["arm"] in opens and complete[_key(entry)[1:]] == len(opens)
    ]


def _answer(server: Server, prompt: Mapping[str, str], tokens: int) -> Entry:
    before = _counts(server)
    answer = asyncio.run(ask(server, prompt["prompt"], tokens))
    after = _counts(server)
    told = {name: answer.timings.get(name, 0) for name in ("draft_n", "draft_n_accepted")}
    rounds, right = _right(answer, after - before)
    _say(f"{prompt['id']}: {answer.num_tokens} tokens in {_seconds(answer):.2f} s")
    return {
        "id": prompt["id"],
        "text": answer.text,
        "tokens": answer.num_tokens,
        "seconds": _seconds(answer),
        "first_s": answer.first_s,
        "rounds": rounds,
        "right": right,
        **told,
    }


def _seconds(answer: Answer) -> float:
    """From the first piece of the text to the last: reading the prompt is no part of it."""
    return answer.times[-1] - answer.times[0]


def _right(answer: Answer, counts: Counter[str]) -> tuple[int, list[int]]:
    """Returns how many rounds drafted, and in how many of them 1, 2, ... draft tokens were right at
    least. Our servers tell it of an answer, llama.cpp's of all since it was started."""
    accepted = {
        int(n): count for n, count in answer.timings.get("acceptance_histogram", {}).items()
    }
    if not accepted:
        return counts["rounds"], [counts[str(place)] for place in range(_POSITIONS)]
    rounds = answer.timings["rounds"] - answer.timings["plain_rounds"]
    least = range(1, _POSITIONS + 1)
    return rounds, [sum(c for n, c in accepted.items() if n >= place) for place in least]


def _counts(server: Server) -> Counter[str]:
    """Returns what llama.cpp's server counts where it was started with --metrics."""
    try:
        with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics") as told:
            text = told.read().decode()
    except (urllib.error.URLError, OSError):
        return Counter()
    found = Counter({place: int(count) for place, count in _BY_POSITION.findall(text)})
    found["rounds"] = sum(map(int, _ROUNDS.findall(text)))
    return found


def figures(entries: Sequence[Entry], prompts: Sequence[Mapping[str, str]], base: str) -> Document:
    """Returns what each arm did, over the arm `base`, by category and in all."""
    runs: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in sorted(entries, key=lambda entry: entry["repeat"]):
        runs[entry["arm"]][entry["id"]].append(entry)
    if not runs:
        raise SystemExit("no prompt was answered by all servers: give more --seconds")
    repeats = min(len(answers) for answers in runs[base].values())  # that each prompt has
    for of_arm in runs.values():
        for answers in of_arm.values():
            del answers[repeats:]
    categories: dict[str, list[str]] = defaultdict(list)
    for prompt in prompts:
        if prompt["id"] in runs[base]:
            categories[prompt["category"]].append(prompt["id"])
    return {"base": base, "arms": {arm: _figures(runs, arm, base, categories) for arm in runs}}


def _figures(
    runs: Mapping[str, Mapping[str, list[Entry]]],
    arm: str,
    base: str,
    categories: Mapping[str, Sequence[str]],
) -> Document:
    pairs = {category: _paired(runs[arm], runs[base], ids) for category, ids in categories.items()}
    ids = [each for of_category in categories.values() for each in of_category]
    every = [entry for each in ids for entry in runs[arm][each]]
    together = joined(list(pairs.values()))
    long = [
        (interval, each)
        for each, interval in zip(ids, prompt_speedups(together), strict=True)
        if runs[arm][each][0]["tokens"] > _LONG
    ]
    rounds = sum(entry["rounds"] for entry in every)
    drafted = sum(entry["draft_n"] for entry in every)
    accepted = sum(entry["draft_n_accepted"] for entry in every)
    worst = min(long, default=None)
    return {
        "prompts": len(ids),
        "rates": {name: _rates([pair]) for name, pair in pairs.items()},
        "all": _rates(list(pairs.values())),
        "worst": worst and {"prompt": worst[1], "ratio": worst[0].value},
        "below_0.97": [each for interval, each in long if interval.value < 0.97],
        "first_ms": 1e3 * median(entry["first_s"] for entry in every),
        "equal_to": {
            other: sum(_same(runs[arm][each], runs[other][each]) for each in ids)
            for other in dict.fromkeys((base, PLAIN))
            if other in runs
        },
        "accepted": accepted / drafted if drafted else None,
        "right": [
            sum(entry["right"][place] for entry in every) / rounds if rounds else None
            for place in range(_POSITIONS)
        ],
    }


def _paired(
    own: Mapping[str, list[Entry]], base: Mapping[str, list[Entry]], ids: Sequence[str]
) -> Paired:
    """Equal texts count the same: one server counts the end of a text as a token, another not."""
    rows: list[list[list[float]]] = [[], [], [], []]
    for each in ids:
        sides = list(zip(own[each], base[each], strict=True))
        tokens = [(b if a["text"] == b["text"] else a)["tokens"] for a, b in sides]
        rows[0].append([float(count - 1) for count in tokens])
        rows[1].append([a["seconds"] for a, _ in sides])
        rows[2].append([b["tokens"] - 1.0 for _, b in sides])
        rows[3].append([b["seconds"] for _, b in sides])
    return Paired(np.array(rows))


def _rates(pairs: Sequence[Paired]) -> Document:
    interval: Interval = speedup(pairs)
    return {"per_second": joined(pairs).rate, "ratio": list(interval)}


def _same(own: Sequence[Entry], other: Sequence[Entry]) -> bool:
    return len({entry["text"] for entry in (*own, *other)}) == 1


def markdown(found: Document) -> str:
    arms = found["arms"]
    kinds = list(next(iter(arms.values()))["rates"])
    header = [
        *("server", *kinds, "all", f"worst of more than {_LONG} tokens", "below 0.97"),
        *("first text, ms", "texts equal", "accepted", "rounds with 1, 2, ... right"),
    ]
    rows = []
    for arm, of in arms.items():
        worst = of["worst"]
        equal = ", ".join(f"{count} {other}'s" for other, count in of["equal_to"].items())
        right = [f"{share:.0%}" for share in of["right"] if share is not None]
        rows.append(
            [
                arm,
                *(_rate(of["rates"][kind]) for kind in kinds),
                _rate(of["all"]),
                f"{worst['ratio']:.2f} {worst['prompt']}" if worst else "",
                str(len(of["below_0.97"])),
                f"{of['first_ms']:.0f}",
                f"{equal} of {of['prompts']}",
                "" if of["accepted"] is None else f"{of['accepted']:.0%}",
                "/".join(right),
            ]
        )
    told = f"Tokens/s, and over {found['base']} (95 % interval)."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join([told, "", *(f"| {' | '.join(line)} |" for line in lines)])


def _rate(of: Document) -> str:
    ratio, low, high = of["ratio"]
    return f"{of['per_second']:.1f}, {ratio:.2f} ({low:.2f} to {high:.2f})"


def _key(entry: Entry) -> tuple[str, int, str]:
    return entry["arm"], entry["repeat"], entry["id"]


def _read(kept: Path | None) -> list[Entry]:
    if kept is None or not kept.exists():
        return []
    return [json.loads(line) for line in kept.read_text("utf-8").splitlines()]


def _keep(kept: Path | None, entry: Entry) -> None:
    if kept is not None:
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
