"""The site builds without a warning, and its pages ask no other address for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import edge_spec

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|preload|icon)")[^>]*?"(http[^"]*)'
)

pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is missing")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: links, anchors and pages that the navigation lacks end it."""
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not FETCHED.findall(page.read_text("utf-8")), page.name


def test_the_reference_shows_every_public_name_and_the_comments_of_fields(site: Path) -> None:
    page = (site / "reference.html").read_text("utf-8")
    shown = set(re.findall(r'<h3 id="(?:edge_spec\.)?(\w+)"', page))
    assert set(edge_spec.__all__) <= shown
    assert "# of the random draws, if any" in page  # of GenerationResult.seed


def test_the_start_page_is_the_readme_with_links_that_hold(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    assert 'href="use.html"' in page and "docs/use" not in page
