"""The pages on the SDK run as they stand, and docs/reference.md is what the docstrings say."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.model
@pytest.mark.parametrize(
    ("page", "num_blocks", "expected"),
    [
        ("sdk.md", 7, ["Paris", '{"name": "', "cancelled"]),
        ("snapshots.md", 1, ["tokens were in the cache"]),
    ],
)
def test_the_examples_of_a_page_run(
    page: str,
    num_blocks: int,
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert len(blocks) >= num_blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)
    said = capsys.readouterr().out
    assert not [text for text in expected if text not in said], said


def generator() -> ModuleType:
    spec = spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say() -> None:
    module = generator()
    assert module.PAGE.read_text("utf-8") == module.reference(), "python docs/make_reference.py"


def test_every_public_name_is_described() -> None:
    """A heading without a text means a docstring is missing."""
    for section in re.split(r"^#{2,3} ", generator().reference(), flags=re.MULTILINE)[1:]:
        title, *lines = section.splitlines()
        text = re.sub(r"```python.*?```", "", "\n".join(lines), flags=re.DOTALL).strip()
        assert text, title
