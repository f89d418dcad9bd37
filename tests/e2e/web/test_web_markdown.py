"""The page's Markdown renderer, in the browser, by tables of what it makes of what."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from edge_spec.apps.web import STATIC

pytest.importorskip("playwright", reason="playwright is not installed")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ADDRESS = "http://page.test"
LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer nofollow" title="{0}">{1}</a>'
TO_A, TO_Q = LINK.format("http://a.b/", "x"), LINK.format("http://a.b/?q=1", "http://a.b/?q=1")
CODE = (
    '<figure class="code"><figcaption><span>{0}</span><button type="button" class="quiet" '
    'data-copy="">Copy</button></figcaption><pre tabindex="0"><code>{1}</code></pre></figure>'
)
INLINE = [  # within a paragraph
    ("a **b** *c* ***d***", "a <strong>b</strong> <em>c</em> <em><strong>d</strong></em>"),
    ("__a__ _b_ snake_case_name", "<strong>a</strong> <em>b</em> snake_case_name"),
    ("2 * 3 * 4, a * b", "2 * 3 * 4, a * b"),
    ("**open and *open", "**open and *open"),
    ("*a **b** c*", "<em>a <strong>b</strong> c</em>"),
    ("**a*", "*<em>a</em>"),
    ("~~a~~ ~b~", "<del>a</del> ~b~"),
    ("`a*b*` ``c`d``", "<code>a*b*</code> <code>c`d</code>"),
    ("`open", "`open"),
    (r"\*a\* \q \\", r"*a* \q " + "\\"),
    ("a  \nb\\\nc\nd", "a<br>b<br>c\nd"),
    ("<b>a</b> &amp; &lt;", "&lt;b&gt;a&lt;/b&gt; &amp;amp; &amp;lt;"),
    ("[x](http://a.b/)", TO_A),
    ('[x](<http://a.b/> "title")', TO_A),
    ("[x](http://a.b/(c))", LINK.format("http://a.b/(c)", "x")),
    ("[**b** c](http://a.b/)", LINK.format("http://a.b/", "<strong>b</strong> c")),
    ("http://a.b/?q=1.", TO_Q + "."),
    ("(<http://a.b/?q=1>)", "(" + TO_Q + ")"),
    ("(http://a.b/?q=1)", "(" + TO_Q + ")"),
    (
        "[a](javascript:x) [b](data:x) [c](/d) [e]",
        "<span>a</span> <span>b</span> <span>c</span> [e]",
    ),
    ("![alt](http://a.b/)", LINK.format("http://a.b/", "alt")),
    (
        "[a [x](http://a.b/) c](http://a.b/)",
        "[a " + TO_A + " c](" + LINK.format("http://a.b/", "http://a.b/") + ")",
    ),
    ("[a](http://", "[a](" + "http://"),
    ("é*é*é **«a»** 日本**語**", "é<em>é</em>é <strong>«a»</strong> 日本<strong>語</strong>"),
]
BLOCKS = [
    ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    (
        "# A #\n## B\n####### c",
        '<h3 class="level-1">A</h3><h4 class="level-2">B</h4><p>####### c</p>',
    ),
    ("A\n===\nB\n---\n#a", '<h3 class="level-1">A</h3><h4 class="level-2">B</h4><p>#a</p>'),
    ("a\n\n---\n***\n_ _ _", "<p>a</p><hr><hr><hr>"),
    ("```py x\na\n\n  b\n```\nc", CODE.format("py", "a\n\n  b") + "<p>c</p>"),
    ("~~~\n```\n~~~", CODE.format("text", "```")),
    ("````\n```\nopen", CODE.format("text", "```\nopen")),
    ("a\n```\n<b>\n```", "<p>a</p>" + CODE.format("text", "&lt;b&gt;")),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("- a\n\n- b", '<ul class="loose"><li><p>a</p></li><li><p>b</p></li></ul>'),
    (
        "* a\n  * b\n    * c\n* d",
        "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    ),
    ("1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("3) a\n4) b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("- a\nlazy\n\nb", "<ul><li>a\nlazy</li></ul><p>b</p>"),
    ("- a\n\n  b\n- c", '<ul class="loose"><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>'),
    (
        "1. a\n   ```\n   b\n   ```\n2. c",
        "<ol><li>a" + CODE.format("text", "b") + "</li><li>c</li></ol>",
    ),
    ("- a\n* b", "<ul><li>a</li></ul><ul><li>b</li></ul>"),
    ("a\n- b", "<p>a</p><ul><li>b</li></ul>"),
    ("a\n1986. b", "<p>a\n1986. b</p>"),
    ("- [ ] a\n- [x] b", "<ul><li>\u2610 a</li><li>\u2611 b</li></ul>"),
    (
        "> a\n> > b\n\nc",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    ),
    ("> a\nlazy", "<blockquote><p>a\nlazy</p></blockquote>"),
    ("> - a\n> - b", "<blockquote><ul><li>a</li><li>b</li></ul></blockquote>"),
    (
        "| a | b |\n|:-:|--:|\n| 1 | *2* |\n| 3 \\| 4 |\n\nc",
        '<div class="wide" tabindex="0"><table><thead><tr><th class="align-center">a</th>'
        '<th class="align-end">b</th></tr></thead><tbody><tr><td class="align-center">1</td>'
        '<td class="align-end"><em>2</em></td></tr><tr><td class="align-center">3 | 4</td>'
        '<td class="align-end"></td></tr></tbody></table></div><p>c</p>',
    ),
    ("a | b\n--|", "<p>a | b\n--|</p>"),
    ("", ""),
]
# Signs that could take long, or end in a tree that is too deep for a browser.
HARD = ["*a ", "**", "[", "![", "](", "`a ``", ">", "> - ", "- ", "-_", "_a* ", "<http://"]
HARD += ["[a](", '[a]("b ', "|", "\\", " ", "#"]
PIECES = ["a", " ", "  ", "\n", "\n\n", "- ", "1. ", "> ", "#", "```", "|", "|-|-|\n", "*", "---"]
PIECES += ["=", "`", "["]


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page that has the renderer at hand."""

    def answer(route: Any) -> None:
        name = route.request.url.removeprefix(f"{ADDRESS}/")
        if name.endswith(".js"):
            content = (STATIC / name).read_text("utf-8")
            route.fulfill(body=content, content_type="text/javascript")
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    context = browser.new_context()
    page = context.new_page()
    page.route("**", answer)
    page.goto(f"{ADDRESS}/")
    page.evaluate("async () => { window.markdown = await import('./markdown.js'); }")
    yield page
    context.close()


@pytest.fixture(scope="module")
def render(page: Page) -> Callable[[str], str]:
    code = """(text) => {
        const parent = document.createElement('div');
        parent.append(...markdown.renderMarkdown(text));
        return parent.innerHTML;
    }"""
    return lambda text: str(page.evaluate(code, text))


@pytest.fixture(scope="module")
def check_streaming(page: Page) -> Callable[[str], None]:
    """Shows a text character by character, and compares it each time with the whole rendered."""
    code = """(text) => {
        const [streamed, whole] = [document.createElement('div'), document.createElement('div')];
        const renderer = new markdown.StreamingMarkdown(streamed);
        for (let end = 1; end <= text.length; end += 1) {
            renderer.show(text.slice(0, end));
            whole.replaceChildren(...markdown.renderMarkdown(text.slice(0, end)));
            if (!streamed.isEqualNode(whole)) return [streamed.innerHTML, whole.innerHTML];
        }
        return null;
    }"""

    def check(text: str) -> None:
        assert page.evaluate(code, text) is None, text

    return check


def test_inline(render: Callable[[str], str]) -> None:
    rendered = {text: render(text) for text, _ in INLINE}
    assert rendered == {text: f"<p>{expected}</p>" for text, expected in INLINE}


def test_blocks(render: Callable[[str], str]) -> None:
    assert {text: render(text) for text, _ in BLOCKS} == dict(BLOCKS)


def test_a_text_looks_the_same_when_it_streams(
    check_streaming: Callable[[str], None],
) -> None:
    for text, _ in INLINE + BLOCKS:
        check_streaming(f"{text}\n\nbetween\n{text}\nend")


def test_any_text_streams(check_streaming: Callable[[str], None]) -> None:
    draw = random.Random(0)
    for _ in range(150):
        check_streaming("".join(draw.choices(PIECES, k=30)))


def test_no_text_takes_long_or_goes_deep(page: Page) -> None:
    """Where work grew with the square of a text, a test's bound of time would end these."""
    code = """(piece) => {
        const nodes = markdown.renderMarkdown(piece.repeat(40_000) + 'x');
        const depth = (node) => {
            let most = 0;
            for (let level = [node]; level.length > 0; most += 1) {
                level = level.flatMap((each) => [...each.children]);
            }
            return most;
        };
        return Math.max(...nodes.map(depth));
    }"""
    for piece in HARD:
        assert page.evaluate(code, piece) < 400, piece
