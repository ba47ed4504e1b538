"""The precision plan as a file: what it says survives, and what no engine could follow is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.errors import CalibrationError
from calibrate.plan import ALL_INT8, PrecisionPlan, Repairs

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.dictionaries(st.text(), st.lists(NUMBERS, max_size=4).map(tuple), max_size=3)
POSITIVE = st.dictionaries(st.text(), st.lists(st.floats(2.0**-10, 1.0), max_size=4).map(tuple), max_size=3)
REPAIRS = st.builds(
    Repairs,
    divisors=POSITIVE,
    offsets=ROWS,
    ranges=st.dictionaries(st.text(), st.floats(0.0, 1e6), max_size=3),
    reach=st.dictionaries(st.text(), st.floats(2.0**-10, 1.0), max_size=3),
    methods=st.dictionaries(st.text(), st.text(), max_size=3),
    clips=POSITIVE,
    shifts=ROWS,
)
EVIDENCE = st.dictionaries(st.text(), st.lists(NUMBERS | st.text() | st.none(), max_size=3), max_size=3)
EXAMPLE = Repairs(
    divisors={"conv1": (0.5, 1.0), "conv2": (1.0,)},
    offsets={"conv1": (0.25, 0.0)},
    ranges={"conv1.equalised": 3.0},
    reach={"conv1.equalised": 0.5},
    methods={"relu1": "mse"},
    clips={"conv2": (0.9, 1.0)},
    shifts={"conv1": (0.125,), "conv2": (-1.0, 2.0)},
)


@given(st.dictionaries(st.text(), st.text()), REPAIRS, EVIDENCE)
def test_a_plan_survives_json(floats: dict[str, str], repairs: Repairs, evidence: dict[str, Any]) -> None:
    plan = PrecisionPlan(floats, repairs, evidence)
    text = plan.to_json()
    again = PrecisionPlan.from_json(text)
    assert again == plan
    assert again.evidence == evidence
    assert again.to_json() == text
    assert Repairs.from_dict(repairs.as_dict()) == repairs


def test_equal_plans_give_equal_bytes() -> None:
    one = PrecisionPlan({"a": "x", "b": "y"}, Repairs(shifts={"c": (1.0,), "d": (2.0,)}))
    other = PrecisionPlan({"b": "y", "a": "x"}, Repairs(shifts={"d": (2.0,), "c": (1.0,)}))
    assert one.to_json() == other.to_json()


def test_evidence_makes_no_other_plan() -> None:
    found = PrecisionPlan({"conv": "loud"}, EXAMPLE, {"loss": 0.01})
    assert found == PrecisionPlan({"conv": "loud"}, EXAMPLE)
    assert "evidence" not in found.essence
    assert found.essence == {"floats": ["conv"], "repairs": EXAMPLE.as_dict()}
    assert ALL_INT8.essence == {"floats": []}


def test_a_plan_of_0_2_0_is_read_as_the_same_plan() -> None:
    text = """{"schema": 3, "floats": {"head": "loses 4 dB"}, "evidence": {"loss": 0.01}, "repairs": {
        "divisors": {"conv1": [0.5, 1.0], "conv2": [1.0]}, "offsets": {"conv1": [0.25, 0.0]},
        "ranges": {"conv1.equalised": 3.0}, "reach": {"conv1.equalised": 0.5}, "methods": {"relu1": "mse"},
        "clips": {"conv2": [0.9, 1.0]}, "shifts": {"conv1": [0.125], "conv2": [-1.0, 2.0]}}}"""
    read = PrecisionPlan.from_json(text)
    assert (read, read.evidence) == (PrecisionPlan({"head": "loses 4 dB"}, EXAMPLE), {"loss": 0.01})
    assert json.loads(read.to_json()) == json.loads(text)
    essence = {"floats": ["head"], "repairs": json.loads(text)["repairs"]}
    assert json.loads(json.dumps(read.essence)) == essence, "ids of engines follow from it"


def test_layers_that_stay_float_need_no_repairs() -> None:
    repairs = PrecisionPlan({"conv1": "loud"}, EXAMPLE).effective
    assert repairs == Repairs(
        divisors={"conv2": (1.0,)},
        ranges=EXAMPLE.ranges,
        reach=EXAMPLE.reach,
        methods=EXAMPLE.methods,
        clips=EXAMPLE.clips,
        shifts={"conv2": (-1.0, 2.0)},
    )
    assert PrecisionPlan({}, EXAMPLE).effective == EXAMPLE


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "plan.format"),
        ("[]", "plan.format"),
        ("[" * 100_000, "plan.format"),
        ('{"floats": {}}', "plan.format"),
        ('{"schema": 3, "floats": {"conv": 3}}', "plan.format"),
        ('{"schema": 3, "floats": []}', "plan.format"),
        ('{"schema": 3, "floats": {}, "evidence": []}', "plan.format"),
        ('{"schema": 2, "floats": {}}', "plan.schema"),
        ('{"schema": 4, "floats": {}}', "plan.schema"),
        ('{"schema": "3", "floats": {}}', "plan.schema"),
        ('{"schema": [], "floats": {}}', "plan.schema"),
    ],
)
def test_refuses_what_is_no_plan(text: str, code: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        PrecisionPlan.from_json(text)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "repairs",
    [
        *("[]", '{"divisor": {}}', '{"divisors": []}', '{"divisors": {"conv": 1.0}}', '{"divisors": {"conv": "11"}}'),
        *(f'{{"divisors": {{"conv": [{value}]}}}}' for value in ('"1"', "true", "null", "0.0")),
        '{"offsets": {"conv": [NaN]}}',
        '{"shifts": {"conv": [1e999]}}',
        '{"shifts": {"conv": [1' + "0" * 400 + "]}}",
        '{"shifts": {"conv": [1' + "0" * 5000 + "]}}",
        '{"clips": {"conv": [0.0]}}',
        '{"clips": {"conv": [1.5]}}',
        '{"ranges": {"conv.equalised": -1.0}}',
        '{"ranges": {"conv.equalised": [1.0]}}',
        '{"reach": {"conv.equalised": 0.0}}',
        '{"methods": {"relu": 3}}',
    ],
)
def test_refuses_repairs_that_no_engine_could_follow(repairs: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        PrecisionPlan.from_json(f'{{"schema": 3, "floats": {{}}, "repairs": {repairs}}}')
    assert caught.value.code == "plan.format"
