"""Every option of `load`, and of answers, that is named or given wrongly is refused in one line,
which says what is meant or what it takes."""

from __future__ import annotations

from typing import Any, get_args

import pytest

import edge_spec
from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.request import AnswerOptions, request_of
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import (
    AskedOptions,
    Option,
    declared_options,
)

OPTIONS = declared_options(AskedOptions)
SOMETHING: Any = object()


def refusal(**given: Any) -> str:
    with pytest.raises(UsageError) as refused:
        edge_spec.load(**{"model": "no-such-model", **given})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def written_wrongly(declared: Option) -> list[str]:
    name = declared.name
    words = name.split("_")
    camel = words[0] + "".join(word.title() for word in words[1:])
    return [f"{name}x", camel + "s", name.upper(), declared.flag[2:].replace("-", "_") + "_"]


@pytest.mark.parametrize("declared", OPTIONS.values(), ids=OPTIONS)
def test_a_name_that_is_nearly_one_is_refused_with_it(declared: Option) -> None:
    for name in {*written_wrongly(declared)} - {declared.name}:
        told = refusal(**{name: 1})
        assert told.startswith(f"load has no option '{name}'. Did you mean {declared.name},"), told
        assert declared.flag in told


@pytest.mark.parametrize("declared", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("value", [None, 1.5, True, "", b"x", {"a": 1}, [SOMETHING], SOMETHING])
def test_a_value_of_another_type_is_refused_with_what_it_takes(
    declared: Option, value: Any
) -> None:
    kinds = get_args(declared.type) or (declared.type,)
    if type(value) in kinds or (value == 1.5 and float in kinds):
        return
    if value is True and bool in kinds:
        return
    told = refusal(**{declared.name: value})
    assert told.startswith(f"{declared.name} is ") and ". It takes " in told
    assert told.endswith(" ".join(declared.help.split()))


@pytest.mark.parametrize("name", ["rpc", "corpora"])
def test_a_text_is_no_list_of_its_characters(name: str) -> None:
    assert ". It takes collections.abc.Sequence[str" in refusal(**{name: "one"})


def test_model_and_progress_are_looked_at_too() -> None:
    assert refusal(model=None).startswith("model is None. It takes str | pathlib.Path. A GGUF file")
    assert refusal(progress=3).startswith(
        "progress is 3. It takes collections.abc.Callable[..., None] | None."
    )
    assert refusal(Model="x").endswith("Did you mean model?")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("temperature", "sampling=SamplingParams(temperature=...)."),
        ("top_p", "sampling=SamplingParams(top_p=...)."),
        ("seed", "sampling=SamplingParams(seed=...)."),
        ("max_tokens", "max_tokens=..., as chat and generate take it."),
        ("max_new_tokens", "max_tokens=..., as chat and generate take it."),
        ("stop", "stop=..., as chat and generate take it."),
    ],
)
def test_what_answers_are_given_load_refuses_with_where_it_belongs(name: str, told: str) -> None:
    assert refusal(**{name: 1}) == f"load has no option '{name}'. Give each answer {told}"


def refused_answer(**options: Any) -> str:
    parts: Any = None  # options are looked at before anything of the model
    with pytest.raises(UsageError) as refused:
        request_of(parts, [1], options)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", AnswerOptions.__annotations__)
@pytest.mark.parametrize("value", [SOMETHING, b"x", {"temperature": 1.0}, 2.5])
def test_an_answers_option_of_another_type_is_refused(name: str, value: Any) -> None:
    told = refused_answer(**{name: value})
    assert told.startswith(f"{name} is ") and ". It takes " in told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_new_tokens", "Give each answer max_tokens=..., as chat and generate take it."),
        ("maxTokens", "Give each answer max_tokens=..., as chat and generate take it."),
        ("temperature", "Give each answer sampling=SamplingParams(temperature=...)."),
        ("temprature", "Give each answer sampling=SamplingParams(temperature=...)."),
        ("threads", "edge_spec.load takes threads."),
        (
            "zzz",
            "There are max_tokens, stop, stop_token_ids, sampling, grammar, logprobs, "
            "prediction, form.",
        ),
    ],
)
def test_an_option_that_answers_do_not_have_is_refused_with_what_is_meant(
    name: str, told: str
) -> None:
    assert refused_answer(**{name: 1}) == f"answers have no option {name}. {told}"


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
def test_sampling_of_another_type_is_refused(name: str) -> None:
    for value in ("warm", SOMETHING):
        with pytest.raises(UsageError) as refused:
            SamplingParams(**{name: value})
        assert str(refused.value).startswith(f"{name} is ")
