"""Random bodies of requests, from the API's own description of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def bodies(schema: dict[str, Any], always: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of the API's own description, with values that are likely, or anything."""
    likely: dict[str, st.SearchStrategy[Any]] = {
        "prompt": st.text(max_size=12)
        | st.lists(st.integers(-2, 5000), max_size=4)
        | st.lists(st.text(max_size=5), max_size=3),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
        "logit_bias": st.dictionaries(st.integers(-5, 5000).map(str), st.floats(-120, 120), max_size=3),
        "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema"])}),
        "speculation": st.sampled_from(["off", "auto", {"method": "suffix"}, {"max_tokens": 2, "trace": True}]),
        "stream": st.booleans(),
    }
    numbers = st.integers(-3, 30) | st.floats(-3, 30) | st.sampled_from([10**20, -(10**20), 1e308])
    fields = {name: likely.get(name, numbers | _JSON) | _JSON for name in schema["properties"] if name not in always}
    few = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    chosen = few.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return chosen.map(lambda extra: {**always, **extra})
