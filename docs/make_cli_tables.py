"""The table of options in docs/cli.md, made of their declaration.

    .venv/bin/python docs/make_cli_tables.py

writes it between its two comments; tests/unit/docs/test_cli_tables.py fails where that was
forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path

from edge_spec.models.asked_options import AskedOptions, Option, declared_options

PAGE = Path(__file__).with_name("cli.md")
BEGIN = "<!-- made by docs/make_cli_tables.py of edge_spec/models/asked_options.py -->\n"
END = "<!-- end of what is made -->\n"
DEFAULT = re.compile(r"\s+\[default: (.*)\]$")  # told in a help text


def table() -> str:
    rows = ["| option | `edge_spec.load` | meaning |", "|---|---|---|"]
    for name, declared in declared_options(AskedOptions).items():
        flag = f"{declared.flag} {declared.value_name}".strip().replace("|", r"\|")
        rows.append(f"| `{flag}` | `{name}` | {_meaning(declared)} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """The page with what is between its comments made again."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the comments around its table")
    return f"{before}{begin}\n{table()}\n{end}{after}"


def _meaning(declared: Option) -> str:
    said = [DEFAULT.sub(r" Without it, \1.", declared.help), declared.more]
    if declared.default not in (None, False, ()):
        said.append(f"Default: `{declared.default}`.")
    if declared.drafters:
        said.append(f"Used by {_listed(declared.drafters)}.")
    if declared.runtimes:
        said.append(f"{_listed(declared.runtimes)} alone.")
    return " ".join(each for each in said if each)


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
