"""YAML that anybody may have written: what is taken, what is refused and where, and that nothing of it grows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from attack.yaml_texts import REFUSED
from hypothesis import given
from hypothesis import strategies as st

from agent.common.bounded_yaml import YamlError, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2026-11-26", "2026-11-26"),
        ("03:00", "03:00"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("-1.5e3", -1500.0),
        ("yes", True),
        ("~", None),
        ("", None),
        ("'12'", "12"),
    ],
)
def test_a_word_has_a_type_of_jsons(text: str, value: Any) -> None:
    assert load_yaml(f"key: {text}") == {"key": value}


def test_anchors_and_merged_keys_save_words() -> None:
    text = "one: &one {a: 1, b: 2}\ntwo: {<<: *one, b: 3}\n"
    assert load_yaml(text) == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "b": 3}}


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_a_refusal_names_the_place(text: str, said: str) -> None:
    with pytest.raises(YamlError, match=re.escape(said)):
        load_yaml(text)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN)
def test_json_documents_come_back(value: Any) -> None:
    assert load_yaml(yaml.safe_dump({"key": value})) == {"key": value}
