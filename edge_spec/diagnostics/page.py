"""Pages of HTML that need nothing beside them."""

from __future__ import annotations

from pathlib import Path


def rendered(template: Path, **values: object) -> str:
    """Returns a Jinja template with these values, which are escaped: what models wrote, and what
    drivers and files say, is text. Raises jinja2's errors for a name that it has no value for."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)
