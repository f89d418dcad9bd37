"""What a file of prompts may hold, and what is said of one that is no such file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from edge_spec.errors import UsageError
from edge_spec.text.prompt_files import OWN_PROMPTS, Prompt, read_prompts

GOOD = '{"id": 7, "category": "any name", "prompt": "Why?"}'


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_our_own_prompts_are_six_of_each_category_with_ids_of_their_own() -> None:
    prompts = read_prompts(OWN_PROMPTS)
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ["conversation", "translation", "summarization", "qa", "math_reasoning", "rag"], 6
    )
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    long = [prompt for prompt in prompts if prompt.category in ("summarization", "rag")]
    assert min(len(prompt.text.split()) for prompt in long) > 300


def test_the_first_turn_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "", '{"id": "b", "category": "qa", "turns": ["One?", "Two?"]}')
    assert read_prompts(path) == [Prompt("7", "any name", "Why?"), Prompt("b", "qa", "One?")]


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Why?\n\n  How? \n", encoding="utf-8")
    assert read_prompts(path) == [Prompt("1", "mine", "Why?"), Prompt("3", "mine", "How?")]


def test_each_category_gives_its_first_prompts(tmp_path: Path) -> None:
    lines = [f'{{"id": {i}, "category": "{"ab"[i % 2]}", "prompt": "x"}}' for i in range(6)]
    assert [prompt.id for prompt in read_prompts(written(tmp_path, *lines), 2)] == list("0123")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("not json", "line 2 of .* is not JSON"),
        ("[1]", "line 2 of .* is not a JSON object"),
        ('{"id": 1, "category": "qa"}', "line 2 of .* has no prompt"),
        ('{"id": 1, "category": "qa", "turns": []}', "line 2 of .* has no prompt"),
        ('{"id": 1, "category": "qa", "prompt": " "}', "line 2 of .* has no prompt"),
        ('{"id": 1, "category": "qa", "prompt": ["x"]}', "line 2 of .* has no prompt"),
        ('{"id": 1, "prompt": "x"}', "line 2 of .* has no category"),
        ('{"category": "qa", "prompt": "x"}', "line 2 of .* has no id"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_prompts(written(tmp_path, GOOD, line))


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no prompts"):
        read_prompts(written(tmp_path, "", " "))
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "latin").write_bytes(b"\xe4\xff")
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "latin")
