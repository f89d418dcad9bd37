"""Prints the section of CHANGELOG.md that a tag is about, or a whole page, for another place.

    python .github/release_notes.py v0.1.0
    python .github/release_notes.py v0.1.0 README.md

Links within the repository, which lead nowhere on a release's page and on the package index, become
addresses of the tag's files, where GITHUB_SERVER_URL and GITHUB_REPOSITORY say whose.

Fails where the tag is not the version of pyproject.toml, or the changelog has no section for it.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^][]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def notes(tag: str) -> str:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but pyproject.toml has version {version}")
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    found = [text for text in sections if text.startswith(f"[{version}]")]
    if not found:
        sys.exit(f"CHANGELOG.md has no section [{version}]")
    return found[0].partition("\n")[2].strip()


def with_addresses(text: str, tag: str) -> str:
    server, repository = (os.environ.get(f"GITHUB_{name}") for name in ("SERVER_URL", "REPOSITORY"))
    if not server or not repository:
        return text
    at = f"{server}/{repository}"

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"  # a picture is shown, a page is read
        return f"{link[1]}[{link[2]}]({at}/{kind}/{tag}/{link[3]})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    tag, *pages = sys.argv[1:]
    text = notes(tag)
    if pages:
        text = (ROOT / pages[0]).read_text("utf-8").strip()
    print(with_addresses(text, tag))
