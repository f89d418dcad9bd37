"""Values that a request gives a chat template by name are shown, whatever they are, or refused."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import ChatTemplate

TEMPLATE = """{{ x | default('') }}{% for each in y | default([]) %}{{ each }}{% endfor %}
{{ z | default(1) | tojson }}
{% if w is mapping %}{% for name, value in w.items() %}{{ name ~ value }}{% endfor %}{% endif %}
{% if n is defined %}{{ 'a' * n }}{% for each in range(n) %}{{ each }}{% endfor %}
{{ ('%' ~ n ~ 'd') | format(1) }}{{ n | string | indent(9) }}{{ [n] * 9 }}{% endif %}
{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{{ messages[0].content }}"""
SHOWN = ChatTemplate(TEMPLATE)
MESSAGES = [{"role": "user", "content": "hello"}]

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["{{ x }}", "<|im_end|>", "__class__", "\x00"]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["items", "keys", "__len__", "a"]), inner, max_size=3),
    ),
    max_leaves=12,
)
names = st.sampled_from(["n", "w", "x", "y", "z", "enable_thinking"])


@given(st.dictionaries(names, values, min_size=1))
def test_no_value_breaks_a_template(given_values: dict[str, Any]) -> None:
    try:
        prompt = SHOWN.render(MESSAGES, template_kwargs=given_values)
    except EdgeSpecError as error:
        assert len(str(error)) < 1500 and "\n" not in str(error)
    else:
        assert prompt.endswith("hello") and len(prompt) < 10_000_000
