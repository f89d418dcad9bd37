"""Our decoding beside another runtime's own server, on the same file and prompts, in turns.

    python benchmarks/peer_server.py --model FILE.gguf --prompts FILE.jsonl --runtime ik \\
        --server "plain=llama-server -m FILE.gguf -t 2 -np 1 --port {port}" \\
        --server "suffix=llama-server -m FILE.gguf ... --port {port}"

Each server is started once and gets the tokens of our prompts by llama.cpp's /completion. Rates are
of decoding alone, as each side tells them. Texts are compared with our own plain ones: kernels of
other builds may decide near ties otherwise.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from common import OWN_PROMPTS, open_engine, read_prompts, report
from servers import peer_server

_OURS = ("none", "auto")  # drafters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--mmap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--lossless", default="auto")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--server", action="append", default=[], help="NAME=COMMAND with {port}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)[: arguments.count]
    options = {name: getattr(arguments, name) for name in ("runtime", "threads", "mmap")}
    with ExitStack() as opened:
        engine = opened.enter_context(
            open_engine(arguments.model, lossless=arguments.lossless, **options)
        )
        servers = {}
        for each in arguments.server:
            name, _, command = each.partition("=")
            servers[name] = opened.enter_context(peer_server(command)).port
        found = measure(engine, servers, prompts, arguments.tokens)
    print(summary(found), flush=True)
    report(found, arguments.json)


def measure(
    engine: Any, servers: dict[str, int], prompts: Sequence[dict[str, str]], num_tokens: int
) -> dict[str, Any]:
    arms = [*_OURS, *servers]
    rates: dict[str, list[tuple[int, float]]] = defaultdict(list)  # tokens, seconds
    differing = dict.fromkeys(arms, 0)
    for number, entry in enumerate(prompts):
        texts = {}
        tokens = engine.parts.text.chat_prompt([{"role": "user", "content": entry["prompt"]}])
        for arm in islice(cycle(arms), number % len(arms), number % len(arms) + len(arms)):
            if arm in servers:
                texts[arm], count, seconds = _asked(servers[arm], tokens, num_tokens)
            else:
                engine.set_drafter(arm)
                result = engine.chat(entry["prompt"], max_tokens=num_tokens)
                texts[arm] = result.text
                count, seconds = result.stats.predicted_n, result.stats.predicted_ms / 1e3
            rates[arm].append((count, seconds))
        for arm in arms:
            differing[arm] += texts[arm].strip() != texts["none"].strip()
    return {
        "runtime": engine.runtime,
        "num_prompts": len(prompts),
        "arms": {
            arm: {
                "tokens_per_s": _rate(found),
                "median_tokens_per_s": median(count / seconds for count, seconds in found),
                "differing": differing[arm],
            }
            for arm, found in rates.items()
        },
    }


def summary(found: dict[str, Any]) -> str:
    arms = found["arms"]
    ours = arms["auto"]["tokens_per_s"]
    lines = ["| | tokens/s | median | ours over it | texts that differ from our plain ones |"]
    lines.append("|---|---|---|---|---|")
    for name, each in arms.items():
        lines.append(
            f"| {name} | {each['tokens_per_s']:.1f} | {each['median_tokens_per_s']:.1f} | "
            f"{ours / each['tokens_per_s']:.2f} | {each['differing']} of {found['num_prompts']} |"
        )
    return "\n".join(lines)


def _rate(found: Sequence[tuple[int, float]]) -> float:
    return sum(count for count, _ in found) / sum(seconds for _, seconds in found)


def _asked(port: int, tokens: Sequence[int], num_tokens: int) -> tuple[str, int, float]:
    """The text, its tokens, and the seconds of decoding as the server tells them."""
    body = {
        "prompt": list(tokens),
        "n_predict": num_tokens,
        "temperature": 0,
        "top_k": 1,
        "cache_prompt": False,
    }
    answer = _posted(port, "/completion", body)
    timings = answer["timings"]
    return answer["content"], timings["predicted_n"], timings["predicted_ms"] / 1e3


def _posted(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


if __name__ == "__main__":
    main()
