"""Records what the product does today, for the tests beside this file to hold later versions to.

    python tests/golden/make.py [PART ...]       # writes PART.json, all of them without a name

Make a part again only where a change of it is meant, and say in the commit what changed and why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PARTS = ("exports", "texts", "real", "apis", "plans", "policy")


def stored(part: str) -> Any:
    return json.loads((FOLDER / f"{part}.json").read_text(encoding="utf-8"))


def difference(expected: Any, got: Any, path: str = "") -> str:
    """Return where two documents first differ, and how; "" where they are equal."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in sorted({*expected, *got}):
            if name not in expected or name not in got:
                return f"{path}/{name} is {'new' if name in got else 'missing'}"
            if found := difference(expected[name], got[name], f"{path}/{name}"):
                return found
        return ""
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            if found := difference(one, other, f"{path}/{index}"):
                return found
        return ""
    return "" if expected == got else f"{path}: {expected!r} was recorded, {got!r} came"


def main() -> None:
    sys.path.insert(0, str(FOLDER.parent))
    for part in sys.argv[1:] or PARTS:
        record: Callable[[], Any] = import_module(f"golden.{part}").record
        text = json.dumps(record(), sort_keys=True, indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{part}.json").write_text(text, encoding="utf-8")
        print(f"{part}.json: {len(text):,} bytes")


if __name__ == "__main__":
    main()
