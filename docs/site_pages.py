"""Gives mkdocs the pages of the root, by names of the site, and makes links between pages hold.

On a code host README.md links to docs/cli.md, and docs/serve.md to ../SECURITY.md. On the site all
of them are neighbours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    for source, page in PAGES.items():
        text = _between_roots((ROOT / source).read_text("utf-8"), Path())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return markdown if page.file.generated_by else _between_roots(markdown, Path("docs"))


def _between_roots(text: str, folder: Path) -> str:
    """Links to files of the root and of docs/ by their names on the site. A link whose text is a
    page's file is called by the page's title. Files that the site does not have are reported."""

    def renamed(match: re.Match[str]) -> str:
        path = (ROOT / folder / match["target"]).resolve()
        name = path.relative_to(ROOT).as_posix()
        name = PAGES.get(name, name.removeprefix("docs/"))
        shown = match["text"]
        if shown == match["target"] and path.is_file():  # else mkdocs says that it is missing
            title = TITLE.search(path.read_text("utf-8"))
            shown = title[1] if title else shown
        return f"[{shown}]({name}{match['anchor'] or ''})"

    return LINK.sub(renamed, text)
