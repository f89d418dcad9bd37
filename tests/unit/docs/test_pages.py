"""README, docs and workflows hang together: links, anchors, the navigation, the changelog."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import edge_spec

ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """As code hosts and the site write them."""
    text = FENCED.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w-]+\.md$", text, re.MULTILINE))
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - listed
    assert not missing, f"add them to nav in mkdocs.yml: {missing}"


def test_the_reference_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    listed = re.findall(r"^(?:::: edge_spec\.|### )(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == edge_spec.__all__


@pytest.mark.parametrize("name", edge_spec.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(edge_spec, name))


def jobs(workflow: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little_and_name_versions(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text("utf-8"))["permissions"] == {"contents": "read"}
    for job in jobs(workflow):
        assert "timeout-minutes" in job
        for step in job["steps"]:
            assert re.search(r"@v\d", step.get("uses", "@v1")), step
            # What an event brings along is text of strangers: it belongs in a variable.
            assert "${{" not in step.get("run", ""), step
            for script in re.findall(r"(?:bash|python) (\S*/\S+)", step.get("run", "")):
                assert (ROOT / script).exists() or script.startswith("-"), script


def test_only_the_step_that_publishes_can() -> None:
    """Builds run code of dependencies, so they hold no right to publish."""
    for workflow in WORKFLOWS:
        for job in jobs(workflow):
            rights = {name for name, kind in job.get("permissions", {}).items() if kind == "write"}
            commands = " ".join(step.get("run", "") for step in job["steps"])
            assert not rights or not re.search(r"\b(pip|build|mkdocs|pytest)\b", commands)


def test_the_changelog_has_a_section_for_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    command = [sys.executable, ROOT / ".github" / "release_notes.py"]
    made = subprocess.run([*command, f"v{version}"], capture_output=True, text=True, check=True)
    assert "### Added" in made.stdout and "## [" not in made.stdout
    refused = subprocess.run([*command, "v9.9.9"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and version in refused.stderr


def test_links_lead_somewhere_on_the_pages_of_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    command = [sys.executable, ROOT / ".github" / "release_notes.py", f"v{version}"]
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://host.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "org/name")
    for page, text in (([], "docs/cli.md"), (["README.md"], "command line")):
        made = subprocess.run([*command, *page], capture_output=True, text=True, check=True)
        assert not LINK.findall(made.stdout)
        address = f"https://host.example/org/name/blob/v{version}/docs/cli.md"
        assert f"[{text}]({address})" in made.stdout
    assert "](https://host.example/org/name/raw/v" in made.stdout  # README's picture
    build, *_ = jobs(ROOT / ".github" / "workflows" / "release.yml")
    commands = " ".join(step.get("run", "") for step in build["steps"])
    assert "README.md > readme.md" in commands.partition("-m build")[0]
