"""Functions are found in source files of any language, and nothing else is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_spec.distill import source_folder
from edge_spec.distill.source_folder import MAX_FILE_BYTES, folder_functions
from edge_spec.errors import UsageError

PYTHON = """
class Adder:
    def add(self, first, second):
        \"\"\"Adds.

    A line of the text that is not indented.
        \"\"\"
        return first + second
"""
GO = """
package main

func sum(values []int) int {
\ttotal := 0
\tfor _, value := range values {
\t\ttotal += value
\t}
\treturn total
}
"""
ALLMAN = """
namespace Shop
{
    public int Sum(
        int first,
        int second)
    {
        if (first > 0)
        {
            return first;
        }
        return second;
    }
}
"""
RUST = """
impl Shape {
    pub fn area(
        &self,
        scale: f64,
    ) -> f64 {
        let side = self.side * scale;
        side * side
    }
}
"""
RUBY = """
module Shop
  def total(items)
    sum = 0
    items.each { |item| sum += item }
    sum
  end
end
"""
SHELL = """
greet() {
  local name="$1"
  if [ -z "$name" ]; then
    name=you
  fi
  echo "hello $name"
}
"""
SQL = """
CREATE TABLE person (
    id BIGINT PRIMARY KEY,
    name TEXT NOT NULL,
    born_on DATE,
    town TEXT
);
"""
PYTHON_2 = """
def show(values):
    for value in values:
        print value
    print "that was all"
    return None
"""
CALL = """
register(
    first,
    second,
    third,
    fourth,
)
"""
BLOCK = """
if (ready(now)) {
  first();
  second();
  third();
  fourth();
}
"""


@pytest.mark.parametrize(
    ("name", "source", "language", "first", "last"),
    [
        ("a.py", PYTHON, "python", "def add(self, first, second):", "return first + second"),
        ("a.go", GO, "go", "func sum(values []int) int {", "}"),
        ("a.cs", ALLMAN, "csharp", "public int Sum(", "}"),
        ("a.rs", RUST, "rust", "pub fn area(", "}"),
        ("a.rb", RUBY, "ruby", "def total(items)", "end"),
        ("tool", SHELL, "", "greet() {", "}"),
        ("a.SQL", SQL, "sql", "CREATE TABLE person (", ");"),
        ("old.py", PYTHON_2, "python", "def show(values):", "return None"),
    ],
)
def test_functions_of_any_language_are_found_whole(
    name: str, source: str, language: str, first: str, last: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(source)
    [found] = folder_functions(tmp_path)
    lines = found.code.splitlines()
    assert (found.language, lines[0], lines[-1].strip()) == (language, first, last)


@pytest.mark.parametrize("source", [CALL, BLOCK, "x = 1\n" * 30, "", "def half(", "\x0c" * 9])
def test_what_is_no_function_is_refused_in_one_line(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text(source)
    with pytest.raises(UsageError, match=r"no function of 5 to 36 lines .* \(1 source file\)"):
        folder_functions(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\0\0\0" + GO.encode(),
        GO.encode() + b"x" * MAX_FILE_BYTES,
        b"\xff\xfe" + b"\0\xd8" * 40,  # halves of characters
        b"a" * 5000 + b"\0",
    ],
    ids=["binary", "large", "no UTF-16", "binary later on"],
)
def test_binary_and_large_files_are_left_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.go").write_bytes(content)
    with pytest.raises(UsageError, match="1 binary, large or unreadable"):
        folder_functions(tmp_path)
    (tmp_path / "b.go").write_text(GO)
    assert len(folder_functions(tmp_path)) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1", "cp1252"])
def test_other_encodings_are_read(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.go").write_bytes(GO.replace("total", "größe").encode(encoding))
    [found] = folder_functions(tmp_path)
    assert "größe" in found.code


def test_links_hidden_files_libraries_and_data_are_left_out(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret.go").write_text(GO)
    folder = tmp_path / "folder"
    for name in (".git/a.go", "node_modules/b/a.go", ".hidden.go", "page.md", "sub/a.rb"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(RUBY if name.endswith("rb") else GO)
    try:
        (folder / "link.go").symlink_to(elsewhere / "secret.go")
        (folder / "round").symlink_to(folder, target_is_directory=True)
    except OSError:
        pass  # not allowed here: the others are looked at all the same
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe.go")  # who opens it waits for ever
    [found] = folder_functions(folder)
    assert found.language == "ruby"


def test_of_a_large_folder_the_same_part_is_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        (tmp_path / f"{number}.go").write_text(GO.replace("sum", f"sum{number}"))
    monkeypatch.setattr(source_folder, "MAX_BYTES", 5 * len(GO) + 50)
    found = folder_functions(tmp_path)
    assert 3 <= len(found) <= 5 and folder_functions(tmp_path) == found
    assert "a part is read" in caplog.text


@pytest.mark.parametrize("name", ["none", "empty"])
def test_a_folder_without_source_files_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no such file|no function of .* \(0 source files\)"):
        folder_functions(tmp_path / name)
