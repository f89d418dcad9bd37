"""The files of the web page: each that is asked for is there, and none comes from elsewhere."""

from __future__ import annotations

import re

import pytest

from edge_spec.apps.web import INDEX, STATIC

TEXTS = {file.name: file.read_text("utf-8") for file in STATIC.iterdir()}


def test_all_that_the_page_asks_for_is_there_and_all_that_is_there_is_used() -> None:
    asked = set(re.findall(r'(?:src|href)="static/([^"]+)"', TEXTS[INDEX.name]))
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            asked |= set(re.findall(r'from "\./([^"]+)"', text))
    assert asked | {INDEX.name} == set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_no_file_names_another_address(name: str) -> None:
    addresses = set(re.findall(r"https?://[\w.]+", TEXTS[name]))
    assert addresses <= {"http://www.w3.org"}  # the name of SVG, which nobody fetches
    assert "@import" not in TEXTS[name]


def test_the_page_keeps_to_a_policy_without_inline_scripts_and_styles() -> None:
    page = TEXTS[INDEX.name]
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".js")])
def test_no_script_makes_code_or_html_of_text(name: str) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", TEXTS[name]
    )


def test_symbols_are_in_the_page_and_used() -> None:
    scripts = "".join(text for name, text in TEXTS.items() if name.endswith(".js"))
    there = set(re.findall(r'<symbol id="icon-(\w+)"', TEXTS[INDEX.name]))
    drawn = set(re.findall(r'\biconButton\("(\w+)"', scripts))
    placed = set(re.findall(r'href="#icon-(\w+)"', TEXTS[INDEX.name]))
    assert drawn | placed <= there
    assert all(name in placed or f'"{name}"' in scripts for name in there)
