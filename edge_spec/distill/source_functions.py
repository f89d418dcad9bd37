"""Finds functions in source files, which a target is asked to change or to explain."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

LEAST_LINES, MOST_LINES = 5, 36
_MOST_CHARACTERS = 1600
# Of every Python's library: code of many hands and kinds, which nobody has to fetch.
_MODULES = (
    *("argparse", "ast", "base64", "bisect", "calendar", "cmd", "configparser", "csv"),
    *("datetime", "difflib", "email/message", "email/utils", "enum", "fnmatch", "fractions"),
    *("functools", "getpass", "glob", "gzip", "heapq", "html/parser", "http/client"),
    *("http/cookiejar", "http/server", "imaplib", "inspect", "ipaddress", "json/decoder"),
    *("json/encoder", "locale", "logging/__init__", "logging/handlers", "mailbox", "mimetypes"),
    *("netrc", "optparse", "os", "pathlib", "pdb", "pickletools", "platform", "plistlib"),
    *("poplib", "posixpath", "pprint", "profile", "queue", "random", "sched", "selectors"),
    *("shelve", "shlex", "shutil", "smtplib", "socketserver", "statistics", "string"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize"),
    *("traceback", "turtle", "unittest/case", "urllib/parse", "urllib/request", "uuid"),
    *("venv/__init__", "wave", "webbrowser", "xml/dom/minidom", "zipfile"),
)
_NAMED = (
    r"(?:def(?:n|un|ine|macro)?|fun|fn|func|function|sub|proc|procedure|subroutine|macro|create)"
)
_DEFINES = re.compile(rf"\(?(?:[a-z]+\s+)*{_NAMED}\b", re.IGNORECASE)
_CALLED = re.compile(r"\w\s*\(")
_STATEMENT = re.compile(  # which has a block, too, and comments
    r"(?:[})\].]|//|/?\*|--|[#;%@]|"
    r"(?:if|elif|elsif|else|for|foreach|while|until|unless|switch|case|match|when|select|do|try|"
    r"catch|except|finally|with|using|lock|synchronized|namespace|module|package|return|throw|"
    r"raise|yield|await|new|assert|import|default)\b)"
)
_OPENS = re.compile(r"(?:[{:=]|->|=>|\b(?:do|then|begin|is|as))$")
_BEGINS_ALONE = re.compile(r"(?:\{|begin|as|is)$", re.IGNORECASE)
_CLOSES = re.compile(r"(?:[})\]]|\$\$|(?:end|fi|done|esac)\b)", re.IGNORECASE)


@dataclass(frozen=True)
class SourceFunction:
    """language: as a fenced block of Markdown names it; "" where it is not known."""

    code: str
    language: str


@cache
def library_functions() -> tuple[SourceFunction, ...]:
    """Returns functions of the standard library of the Python that runs."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for module in _MODULES:
        path = folder / f"{module}.py"
        if path.is_file():  # another version may have a package in its place, or nothing
            found.update(dict.fromkeys(functions_of(path.read_text("utf-8"), "python")))
    return tuple(SourceFunction(code, "python") for code in found)


def functions_of(source: str, language: str) -> Iterator[str]:
    """Yields the functions and methods of a source file that are neither tiny nor long, as they are
    written, without their indentation."""
    lines = source.splitlines()
    for first, end in _places(source, lines, language):
        code = dedent("\n".join(lines[first:end])).strip()
        if LEAST_LINES <= end - first <= MOST_LINES and len(code) <= _MOST_CHARACTERS:
            yield code


def _places(source: str, lines: Sequence[str], language: str) -> Iterator[tuple[int, int]]:
    if language == "python":
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # of another version of Python
        else:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    yield node.lineno - 1, node.end_lineno
            return
    lines = [line.expandtabs(4) for line in lines]
    for first, line in enumerate(lines):
        end = _end_of_block(lines, first) if _may_define(line.strip()) else None
        if end is not None:
            yield first, end


def _may_define(line: str) -> bool:
    """Says whether a line looks like the first of a function, in whatever language."""
    return not _STATEMENT.match(line) and bool(_DEFINES.match(line) or _CALLED.search(line))


def _end_of_block(lines: Sequence[str], first: int) -> int | None:
    """Returns the line after the block that begins with this line, by its indentation; None where
    it begins none, or one that is too long."""
    indent = _indent(lines[first])
    opened = bool(_DEFINES.match(lines[first].strip()) or _OPENS.search(lines[first].rstrip()))
    end = first + 1  # after the last line that belongs to it for certain
    for at in range(first + 1, min(first + 1 + MOST_LINES, len(lines))):
        line = lines[at].strip()
        if not line:
            continue
        if _indent(lines[at]) > indent:
            end = at + 1
        elif _indent(lines[at]) < indent:
            return end if opened and end > first + 1 else None
        elif _BEGINS_ALONE.match(line) or (line[0] in ")]" and _OPENS.search(line)):
            opened, end = True, at + 1  # after a declaration of several lines, or on its own line
        elif end == first + 1 or not opened:
            return None
        else:
            return at + 1 if _CLOSES.match(line) else end
    return end if opened and end == len(lines) and end > first + 1 else None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
