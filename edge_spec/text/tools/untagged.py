"""What models write around a call whose form's tags they have left out."""

from __future__ import annotations

from typing import Literal

from edge_spec.text.tools.literals import PARTIAL, Partial

FENCE = "```"
_FENCES = (FENCE, f"{FENCE}json", f"{FENCE}xml")
_NAMES = ("tool_call", "function_call", "tools", "tool", "response", "json", "JSON", "xml")
TAGS = tuple(f"<{name}>" for name in _NAMES)
_ENDS = (FENCE, *(f"</{name}>" for name in _NAMES))
LEFT = "}],;)"  # what a model may write too much of after a call
_BRACES = ("{", "[{")
# What a call begins with, up to its first brace: where a line of text, a block or a tag begins,
# and where the answer does.
OPENINGS = [
    fence + tag + brace for fence in ("", *_FENCES) for tag in ("", *TAGS) for brace in _BRACES
]
FIRST_OPENINGS = [*OPENINGS, *(f"<|python_tag|>{brace}" for brace in _BRACES)]
STARTS = (FENCE, *TAGS, "\n{", "\n[{")

# What the expressions have for %. More space could become an answer of nothing else.
_SPACE = r"[ \t\r\n]{0,12}"
# Text with none but whole blocks of code. What follows a fence in a block tells if it ends it.
_PLAIN = "[^`]|`[^`]|``[^`]"
_BLOCK = f"{FENCE}({_PLAIN}|{FENCE}[a-zA-Z])*{FENCE}"
_OUTSIDE = f"({_PLAIN})*({_BLOCK}(([^`a-zA-Z]|`[^`]|``[^`])({_PLAIN})*)?)*"
END_PATTERN = rf"%\}}(%\}})?(%\])?(%<\/({'|'.join(_NAMES)})>)?(%{FENCE})?".replace("%", _SPACE)
_NAME = r'\{%(\{%)?("type"%:%"function"%,%)?"name"%:%"'
ARGUMENTS_PATTERN = r'"%,%"(arguments|parameters)"%:%'.replace("%", _SPACE)


def after_ending(text: str) -> str | Literal[Partial.PARTIAL] | None:
    """Returns what follows a piece of what closes a call, which the text begins with; None if it
    begins with something else, such as the fence that opens another block."""
    for end in _ENDS:
        if text == FENCE or (end.startswith(text) and text != end):
            return PARTIAL
        rest = text.removeprefix(end)
        if rest != text and (end != FENCE or rest[0].isspace()):
            return rest
    return text[1:] if text[0] in LEFT else None


def head_pattern(own_tag: str) -> str:
    """Returns a regular expression of an answer up to the name in its first call.

    own_tag: of the form; what follows it is no untagged call.
    """
    return rf"(%|{_OUTSIDE}(\n|{_wrapping(own_tag)}))(\[%)?{_NAME}".replace("%", _SPACE)


def _wrapping(own_tag: str) -> str:
    names = "|".join(tag[1:-1] for tag in TAGS if tag != own_tag)
    return f"(<({names})>%|{FENCE}(json|xml)?%(<({names})>%)?)"
