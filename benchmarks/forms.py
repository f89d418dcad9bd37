"""Answers that have to fit a JSON schema, with and without drafting, in turns.

    python benchmarks/forms.py
    python benchmarks/forms.py --drafter none,auto,lookahead --repeat 5

Prints tokens a second of each, the median over the repeats, their ratio to the first, and whether
all texts are the same. What the schema spells out is drafted by the drafter `grammar`, which takes
part wherever anything is drafted.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from common import open_engine, report

from edge_spec.text.grammar import Grammar

TEXT = {"type": "string", "maxLength": 60}
CASES = {
    "person": (
        "Describe a person.",
        {"name": TEXT, "age": {"type": "integer"}, "city": TEXT, "married": {"type": "boolean"}},
    ),
    "recipe": (
        "Give a recipe for a soup.",
        {
            "title": TEXT,
            "minutes": {"type": "integer"},
            "ingredients": {"type": "array", "items": TEXT, "maxItems": 5},
        },
    ),
    "weather": (
        "What may the weather be tomorrow?",
        {
            "forecast": {"enum": ["sunny", "cloudy", "rain", "snow"]},
            "temperature_celsius": {"type": "integer"},
            "wind": {"enum": ["none", "light", "strong"]},
            "explanation": TEXT,
        },
    ),
}


def schema(properties: dict[str, Any]) -> Grammar:
    return Grammar.json_schema(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="none,auto", help="Names joined by commas.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    drafters = arguments.drafter.split(",")
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    texts: dict[str, set[str]] = defaultdict(set)
    with open_engine(arguments.model) as engine:
        for turn in range(arguments.repeat + 1):
            for name, (prompt, properties) in CASES.items():
                for drafter in drafters:
                    engine.set_drafter(drafter)
                    result = engine.chat(prompt, grammar=schema(properties), max_tokens=200)
                    texts[name].add(result.text)
                    if turn:  # the first warms caches up
                        rates[name, drafter].append(result.stats.predicted_per_second)
    found = {}
    for name in CASES:
        plain = median(rates[name, drafters[0]])
        for drafter in drafters:
            rate = median(rates[name, drafter])
            found[f"{name}, {drafter}"] = {"tokens_per_second": rate, "ratio": rate / plain}
            print(f"{name:8s} {drafter:12s} {rate:7.1f} tokens/s {rate / plain:6.2f}x")
        print(f"{name:8s} {'texts are equal' if len(texts[name]) == 1 else 'TEXTS DIFFER'}")
    report({"rates": found}, arguments.json)


if __name__ == "__main__":
    main()
