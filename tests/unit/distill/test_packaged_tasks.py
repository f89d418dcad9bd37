"""Tasks for a model that programs: the same for the same number."""

from __future__ import annotations

from edge_spec.distill.packaged_tasks import PackagedTasks, functions_of

METHOD = '''
class Adder:
    def add(self, first, second):
        """Adds.

        A longer text.
        """
        return first + second

    def tiny(self):
        return 1
'''


def test_tasks_are_the_same_for_the_same_number_and_differ_by_it() -> None:
    prompts = [PackagedTasks(8).prompt(task) for task in range(40)]
    assert prompts == [PackagedTasks(8).prompt(task) for task in range(40)]
    assert len(set(prompts)) > 30 and any("```python\ndef " in each for each in prompts)
    assert PackagedTasks(8, 1).prompt(3) != prompts[3]
    assert PackagedTasks(8).identity != PackagedTasks(9).identity


def test_functions_are_given_without_their_indentation_and_tiny_ones_are_not() -> None:
    (found,) = functions_of(METHOD)
    assert found.startswith("def add(self") and found.endswith("\n    return first + second")
