"""Functions of Python's own library, which a model is asked to change or to explain."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
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


@cache
def library_functions() -> tuple[str, ...]:
    """Returns functions of the standard library of the Python that runs."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for module in _MODULES:
        path = folder / f"{module}.py"
        if path.is_file():  # another version may have a package in its place, or nothing
            found.update(dict.fromkeys(functions_of(path.read_text("utf-8"))))
    return tuple(found)


def functions_of(source: str) -> Iterator[str]:
    """Yields the functions and methods of a Python file that are neither tiny nor long, as they are
    written, without their indentation."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.lineno - 1
            code = dedent("\n".join(lines[first : node.end_lineno])).strip()
            is_short = LEAST_LINES <= node.end_lineno - first <= MOST_LINES
            if is_short and len(code) <= _MOST_CHARACTERS:
                yield code
