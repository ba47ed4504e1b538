"""A store keeps what is needed, and removes the rest in order."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from engines.store.retention import Stored, retain

IDS = tuple("abcdefgh")
PINS = st.dictionaries(st.sampled_from(("current", "previous", "regime", "loaded")), st.sets(st.sampled_from(IDS)))
TROUBLE = ("", "", "", "artefact.damaged", "artefact.missing", "artefact.schema", "artefact.unreadable")


@st.composite
def stores(draw: st.DrawFn) -> list[Stored]:
    ids = draw(st.sets(st.sampled_from(IDS)))
    return [
        Stored(
            identity,
            made_s=draw(st.integers(0, 3)),
            nbytes=draw(st.integers(0, 9)),
            trouble=draw(st.sampled_from(TROUBLE)),
            model=draw(st.sampled_from(("", "night", "day"))),
            reference=draw(st.booleans()),
        )
        for identity in sorted(ids)
    ]


@given(stores(), PINS, st.integers(0, 4))
def test_nothing_that_is_needed_goes(stored: list[Stored], pins: Mapping[str, set[str]], keep: int) -> None:
    retention = retain(stored, pins, keep)
    needed = set().union(*pins.values())
    going = [one.id for one in (*retention.goes, *retention.spare)]
    assert not needed.intersection(going)
    assert {one.id for one in stored if one.trouble in ("artefact.schema", "artefact.unreadable")}.isdisjoint(going)


@given(stores(), PINS, st.integers(0, 4))
def test_each_stays_for_a_reason_or_goes(stored: list[Stored], pins: Mapping[str, set[str]], keep: int) -> None:
    retention = retain(stored, pins, keep)
    gone = [one.id for one in retention.goes]
    assert sorted([*retention.roles, *gone]) == sorted(one.id for one in stored)
    assert all(retention.roles.values())
    for identity, roles in retention.roles.items():
        assert all(identity in ids for role, ids in pins.items() if role in roles)
    assert [retention.roles[one.id] for one in retention.spare] == [("recent",)] * len(retention.spare)
    assert sum("recent" in roles for roles in retention.roles.values()) <= keep


@given(stores(), PINS, st.integers(0, 4))
def test_a_reference_stays_for_every_model_that_is_needed(
    stored: list[Stored], pins: Mapping[str, set[str]], keep: int
) -> None:
    retention = retain(stored, pins, keep)
    sound = [one for one in stored if one.reference and not one.trouble]
    needed = {one.model for one in stored if one.model and any(one.id in ids for ids in pins.values())}
    for model in needed & {one.model for one in sound}:
        newest = max((one for one in sound if one.model == model), key=lambda one: (one.made_s, one.id))
        assert "reference" in retention.roles[newest.id]
    if sound:
        assert any(one.id in retention.roles for one in sound) or needed


@given(stores(), PINS, st.integers(0, 4))
def test_damaged_artefacts_go_first_then_old_ones(
    stored: list[Stored], pins: Mapping[str, set[str]], keep: int
) -> None:
    retention = retain(stored, pins, keep)
    assert list(retention.goes) == sorted(retention.goes, key=lambda one: (not one.damaged, one.made_s, one.id))
    recent = [one.made_s for one in stored if "recent" in retention.roles.get(one.id, ())]
    for one in retention.goes:
        assert one.damaged or all(one.made_s <= made_s for made_s in recent)


def test_an_engine_in_each_role() -> None:
    def engine(identity: str, made_s: float, **more: object) -> Stored:
        return Stored(identity, made_s, 10, model="m", **more)  # type: ignore[arg-type]  # one of each type

    stored = [
        engine("reference", 0.0, reference=True),
        Stored("other model's", 0.5, 10, model="other", reference=True),
        engine("night", 1.0),
        engine("older", 2.0),
        engine("broken", 9.0, trouble="artefact.damaged"),
        engine("old", 3.0),
        engine("before", 4.0),
        engine("now", 5.0),
    ]
    pins = {"current": ["now"], "previous": ["before"], "regime": ["night", "now"], "loaded": ["now"]}
    retention = retain(stored, pins, keep=3)
    assert retention.roles == {
        "reference": ("reference",),
        "night": ("regime",),
        "old": ("recent",),
        "before": ("previous", "recent"),
        "now": ("current", "regime", "loaded", "recent"),
    }
    assert [one.id for one in retention.goes] == ["broken", "other model's", "older"]
    assert [one.id for one in retention.spare] == ["old"]
