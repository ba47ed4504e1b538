"""The parts of a rollout, each for itself: its waves, gates, windows, and operations."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.common.errors import CommandError
from fleet.devices.devices import Device
from fleet.rollout.gates import FAILURES_GATE, Standing, judge, parse_gates
from fleet.rollout.spec import (
    RolloutSpec,
    check_zone,
    open_until,
    order_devices,
    parse_waves,
    parse_windows,
    wave_sizes,
)


def device(name: str, **tags: str) -> Device:
    values: dict[str, Any] = dict.fromkeys(("state", "agent_version", "model", "engine", "calibration"))
    return Device(**{"id": 1, "fleet": "f", "name": name, "last_seen": 0.0, "tags": tags, **values})


def standing(name: str = "a", failure: str = "", reached: bool = True, **after: float) -> Standing:
    return Standing(name, failure, reached, {"latency_p99": 10.0}, after or None)


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("1,5%,25%,100%", 10_000, [1, 499, 2000, 7500]),
        ("1,5%,25%,100%", 10, [1, 2, 7]),  # 5 % of ten is the first one already
        ("10,100", 40, [10, 30]),  # no more than there are
        ("0.5%,50%", 1000, [5, 495]),  # the others are left alone
    ],
)
def test_waves_count_those_before_them(text: str, total: int, expected: list[int]) -> None:
    assert wave_sizes(parse_waves(text), total) == expected


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True), st.integers(1, 5000))
def test_waves_that_end_with_all_reach_all(percents: list[int], total: int) -> None:
    text = ",".join(f"{each}%" for each in sorted({*percents, 100}))
    found = wave_sizes(parse_waves(text), total)
    assert sum(found) == total
    assert min(found) >= 1


@pytest.mark.parametrize("text", ["", "0", "1,1", "5%,1%", "5%,10", "1,x", "101%", "-1", "1.5", "0%", "nan%"])
def test_waves_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="correct --waves"):
        parse_waves(text)


def test_the_order_is_random_by_name_or_by_a_tag() -> None:
    boards = [device(f"b{number:02d}", **({"ring": str(number % 12)} if number != 5 else {})) for number in range(30)]
    drawn = [each.name for each in order_devices(boards, "random", "seed")]
    assert sorted(drawn) == [each.name for each in boards] != drawn
    assert drawn == [each.name for each in order_devices(boards[::-1], "random", "seed")]
    assert drawn != [each.name for each in order_devices(boards, "random", "another")]
    assert [each.name for each in order_devices(boards[::-1], "name", "")] == [each.name for each in boards]
    rings = [each.tags.get("ring") for each in order_devices(boards, "tag.ring", "seed")]
    assert rings == [*sorted((each for each in rings if each), key=int), None]  # 2 before 10


@pytest.mark.parametrize(
    ("gate", "wave", "passes"),
    [
        ("failures<=2%", [standing(str(n), failure="x" * (n < 1)) for n in range(50)], True),
        ("failures<=2%", [standing(str(n), failure="x" * (n < 2)) for n in range(50)], False),
        ("failures<=0.7%", [standing(str(n), failure="x" * (n < 7)) for n in range(1000)], True),  # exactly
        ("failures<2%", [standing(str(n), failure="x" * (n < 1)) for n in range(50)], False),
        ("unreached<=10%", [standing(str(n), reached=n >= 1) for n in range(10)], True),
        ("unreached<=10%", [standing(str(n), reached=n >= 2) for n in range(10)], False),
        ("fidelity>=0.9", [standing(fidelity=0.899)], False),
        ("fidelity>=0.9", [standing()], False),  # it has reported nothing since
        ("fidelity>=0.9", [standing(str(n), fidelity=0.8 + 0.1 * (n >= 1)) for n in range(20)], True),
        ("fidelity>=0.9", [standing(str(n), fidelity=0.8 + 0.1 * (n >= 2)) for n in range(20)], False),
        ("fidelity>=0.9@100%", [standing(str(n), fidelity=0.8 + 0.1 * (n >= 1)) for n in range(20)], False),
        ("latency_p99<=1.2x", [standing(latency_p99=12.1)], False),
        ("fps>=0.9x", [standing(fps=30.0)], False),  # the value before is unknown
        # A board that failed counts for the failures, and nowhere else.
        ("failures<=50%,fidelity>=0.9", [standing(fidelity=1.0), standing("b", "broken", fidelity=0.1)], True),
        ("failures<=100%,fidelity>=0.9", [standing("b", "broken", fidelity=1.0)], False),  # no board to judge by
        ("failures<=100%,unreached<=100%", [standing(reached=False)], False),  # no board was there
    ],
)
def test_a_gate_passes_or_not(gate: str, wave: list[Standing], passes: bool) -> None:
    gates = [each for each in parse_gates(gate) if each.text in gate]
    assert all(each.passed for each in judge(gates, wave)) is passes


def test_a_gate_gives_its_finding_in_figures() -> None:
    wave = [standing("a", fidelity=0.95), standing("b", fidelity=0.5), standing("c"), standing("d", "d: it broke")]
    sent = {each.gate: each.found for each in judge(parse_gates("fidelity>=0.9,failures<=10%"), wave)}
    assert sent["fidelity>=0.9"] == (
        "holds on 1 of 3 boards, 3 are needed; 1 have reported nothing to judge by since; "
        "not on b with 0.5, where 0.9 is the bound"
    )
    assert sent["failures<=10%"] == "1 of 4, 25.0%; d: d: it broke"


def test_failures_are_always_counted() -> None:
    assert [each.text for each in parse_gates("")] == [FAILURES_GATE]
    assert [each.text for each in parse_gates("fps>=10")] == ["fps>=10", FAILURES_GATE]
    assert [each.text for each in parse_gates("failures<=50%")] == ["failures<=50%"]


def test_enough_failures_put_a_gate_out_of_reach() -> None:
    (gate,) = parse_gates("failures<=2%")
    assert not gate.is_out_of_reach(failed=2, unreached=0, total=100)
    assert gate.is_out_of_reach(failed=3, unreached=0, total=100)
    (unreached, _) = parse_gates("unreached<=10%")
    assert unreached.is_out_of_reach(failed=0, unreached=11, total=100)
    assert not unreached.is_out_of_reach(failed=100, unreached=10, total=100)


@pytest.mark.parametrize(
    "text",
    [
        *("happiness>=1", "fidelity=0.9", "fidelity>=high", "failures<=2", "failures>=2%", "failures<=2%@50%"),
        *("fps>=9%", "fidelity>=0.9@0%", "fidelity>=0.9@101%", "seen_s<=10", "name>=1", "fidelity"),
    ],
)
def test_a_gate_that_is_none_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_gates(text)
    assert caught.value.code == "rollout.gate"
    assert caught.value.remedy == "correct --gate"


def at(zone: str, text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("window", "zone", "now", "closes"),
    [
        ("01:00-05:00", "UTC", "2026-11-22T00:59:59", None),
        ("01:00-05:00", "UTC", "2026-11-22T01:00:00", "2026-11-22T05:00:00"),
        ("01:00-05:00", "UTC", "2026-11-22T05:00:00", None),
        ("01:00-05:00", "Asia/Tokyo", "2026-11-22T03:30:00", "2026-11-22T05:00:00"),
        ("22:00-05:00", "Europe/Berlin", "2026-11-22T23:00:00", "2026-11-23T05:00:00"),
        ("22:00-05:00", "Europe/Berlin", "2026-11-22T04:00:00", "2026-11-22T05:00:00"),
        ("20:00-24:00", "UTC", "2026-11-22T23:59:00", "2026-11-23T00:00:00"),
        # The clocks go back at 03:00: five o'clock is an hour later.
        ("01:00-05:00", "Europe/Berlin", "2026-10-25T01:30:00", "2026-10-25T05:00:00"),
        ("01:00-05:00", "Europe/Berlin", "2026-03-29T01:30:00", "2026-03-29T05:00:00"),
        ("01:00-05:00", "UTC", "2026-11-22T04:59:30", None),  # hardly any time is left for a command
    ],
)
def test_a_window_is_of_the_boards_own_clock(window: str, zone: str, now: str, closes: str | None) -> None:
    found = open_until(parse_windows([window]), at(zone, now), zone)
    assert found == (None if closes is None else at(zone, closes))


def test_an_hour_that_comes_twice_ends_after_it_has_begun() -> None:
    """The clocks of Berlin go back from 03:00 to 02:00 that night."""
    now = at("UTC", "2026-10-25T01:15:00")  # 02:15 there, for the second time
    assert open_until(parse_windows(["01:00-02:30"]), now, "Europe/Berlin") == now + 900.0


def test_without_a_window_it_never_closes_and_of_two_the_later_end_counts() -> None:
    now = at("UTC", "2026-11-22T02:00:00")
    assert open_until((), now, "UTC") == float("inf")
    assert open_until(parse_windows(["01:00-03:00", "02:00-04:00"]), now, "UTC") == at("UTC", "2026-11-22T04:00:00")


@pytest.mark.parametrize("text", ["1-5", "25:00-05:00", "01:60-05:00", "01:00", "01:00-24:01", "night"])
def test_hours_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="correct --window"):
        parse_windows([text])


@pytest.mark.parametrize("name", ["Europe/Nowhere", "", "../etc/passwd", "\0"])
def test_a_time_zone_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(CommandError, match="IANA"):
        check_zone(name)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ({"op": "reboot"}, "rollout.op"),
        ({"op": "recalibrate", "arguments": {"frames": "many"}}, "command.args"),
        ({"op": "policy"}, "command.args"),
        ({"op": "policy", "arguments": {"recalibration.max_loss": 2**60}}, "command.args"),
        ({"op": "recalibrate", "gates": "happiness>=1"}, "rollout.gate"),
        ({"op": "recalibrate", "waves": "all"}, "rollout.waves"),
        ({"op": "recalibrate", "order": "backwards"}, "rollout.order"),
        ({"op": "recalibrate", "timezone": "Mars"}, "rollout.zone"),
        ({"op": "recalibrate", "windows": ("soon",)}, "rollout.window"),
    ],
)
def test_an_impossible_rollout_is_refused_at_once(overrides: dict[str, Any], code: str) -> None:
    with pytest.raises(CommandError) as caught:
        RolloutSpec(**overrides)
    assert caught.value.code == code
