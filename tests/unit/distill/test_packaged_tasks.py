"""Tasks for a model that programs: the same for the same number, and of a user's functions."""

from __future__ import annotations

from edge_spec.distill.packaged_tasks import PackagedTasks
from edge_spec.distill.prompts import HELD_OUT
from edge_spec.distill.source_functions import SourceFunction

BODY = "    let first = 1;\n    let second = 2;\n    let third = 3;\n"
FUNCTIONS = tuple(
    SourceFunction(f"fn function_{number:03}() {{\n{BODY}    first + second + third\n}}", "rust")
    for number in range(100)
)


def test_tasks_are_the_same_for_the_same_number_and_differ_by_it() -> None:
    prompts = [PackagedTasks(8).prompt(task) for task in range(40)]
    assert prompts == [PackagedTasks(8).prompt(task) for task in range(40)]
    assert len(set(prompts)) > 30
    assert PackagedTasks(8, 1).prompt(3) != prompts[3]


def test_other_functions_are_another_run() -> None:
    runs = [PackagedTasks(8), PackagedTasks(8, functions=FUNCTIONS)]
    runs += [PackagedTasks(8, functions=FUNCTIONS[:-1]), PackagedTasks(9, functions=FUNCTIONS)]
    assert len({each.identity for each in runs}) == len(runs)


def test_a_users_functions_are_asked_about_in_their_language() -> None:
    tasks = PackagedTasks(8, functions=FUNCTIONS)
    prompts = [tasks.prompt(task) for task in range(400)]
    about = [each for each in prompts if "fn function_" in each]
    assert len(about) > 300
    assert not any("f-strings" in each or "docstring" in each for each in about)
    assert any("```rust" in each for each in about)
    assert any("rust" in each for each in prompts if "fn function_" not in each)
    beginnings = [each for each in about if "Here is the beginning of a function" in each]
    assert beginnings and not any("third" in each for each in beginnings)
    broken = [each for each in about if "line is missing" in each]
    whole = {each.code for each in FUNCTIONS}
    assert broken and not any(code in each for each in broken for code in whole)


def test_held_out_tasks_are_about_other_functions_than_those_that_are_learnt_from() -> None:
    tasks = PackagedTasks(8, functions=FUNCTIONS)
    numbers: dict[bool, set[str]] = {False: set(), True: set()}
    for task in range(600):
        _, found, rest = tasks.prompt(task).partition("fn function_")
        if found:
            numbers[task % HELD_OUT == HELD_OUT - 1].add(rest[:3])
    assert numbers[True] and not numbers[True] & numbers[False]


def test_one_function_is_enough_and_may_have_words_alone_in_its_lines() -> None:
    for function in (FUNCTIONS[0], SourceFunction("f() {\n  a\n  b\n  c\n}", "")):
        tasks = PackagedTasks(8, functions=(function,))
        assert all(tasks.prompt(task) for task in range(100))
