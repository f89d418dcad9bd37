"""Prints the section of CHANGELOG.md that a tag is about.

    python .github/release_notes.py v0.1.0

Fails where the tag is not the version of pyproject.toml, or the changelog has no section for it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str) -> str:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but pyproject.toml has version {version}")
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    found = [text for text in sections if text.startswith(f"[{version}]")]
    if not found:
        sys.exit(f"CHANGELOG.md has no section [{version}]")
    return found[0].partition("\n")[2].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
