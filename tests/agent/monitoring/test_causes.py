"""Why an alarm came: what has changed in the view is named first, and each remedy has its receipt."""

from __future__ import annotations

import json
import math
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from agent.monitoring.causes import Appearance, AppearanceHistory, Relighting, explanation
from agent.monitoring.view import FrameFeatures
from calibrate.histogram import abs_histogram
from calibrate.statistics.evidence import Interval

Image = NDArray[np.uint8]


def street(number: int) -> Image:
    """A view with coarse and fine detail, and a little noise."""
    chance = np.random.default_rng(1)
    coarse = cv2.resize(chance.integers(40, 200, (9, 16)).astype(np.float32), (320, 180))
    fine = cv2.resize(chance.normal(0.0, 25.0, (30, 53)).astype(np.float32), (320, 180), interpolation=cv2.INTER_CUBIC)
    noise = np.random.default_rng(number).normal(0.0, 1.0, (180, 320))
    return np.repeat(np.clip(coarse + fine + noise, 0, 255).astype(np.uint8)[..., None], 3, axis=2)


def changed(image: Image, cause: str, number: int) -> Image:
    light = image.astype(np.float32)
    if cause == "dark":
        light *= 0.4
    elif cause == "bright":
        light *= 1.6
    elif cause == "contrast":
        light = (light - light.mean()) * 0.5 + light.mean()
    elif cause == "noise":
        light += np.random.default_rng(100 + number).normal(0.0, 25.0, light.shape).astype(np.float32)
    elif cause == "blur":
        light = np.asarray(cv2.GaussianBlur(light, (0, 0), 3.0), np.float32)
    return np.clip(light, 0, 255).astype(np.uint8)


def history(cause: str, before: float = 0.9, now: float = 0.9) -> AppearanceHistory:
    appearances = AppearanceHistory()
    for number in range(48):
        image, confidence = street(number), before
        if number >= 24:
            image, confidence = changed(image, cause, number), now
        appearances.add(Appearance.from_features(FrameFeatures.from_image(image), confidence))
    return appearances


@pytest.mark.parametrize(
    ("cause", "named"),
    [("dark", "light"), ("bright", "light"), *((each, each) for each in ("contrast", "noise", "blur"))],
)
def test_the_change_of_the_view_is_named_first(cause: str, named: str) -> None:
    first, *_ = history(cause).changes
    assert first.cause == named
    assert (first.octaves > 0.0) is (cause in ("bright", "noise"))


def test_a_view_that_looks_the_same_has_other_content() -> None:
    (change,) = history("nothing").changes
    assert (change.cause, change.octaves) == ("content", 0.0)
    assert AppearanceHistory().changes == (change,)


def test_the_first_looks_outlive_the_process() -> None:
    appearances, kept = history("dark"), AppearanceHistory()
    kept.restore(json.loads(json.dumps(appearances.state())))
    for number in range(24):
        kept.add(Appearance.from_features(FrameFeatures.from_image(changed(street(number), "dark", number)), 0.9))
    assert kept.changes[0].cause == "light"
    assert kept.relighting == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("key", ["luminance", "contrast", "noise", "sharpness", "confidence"])
def test_first_looks_that_are_damaged_are_refused(key: str) -> None:
    state, kept = history("dark").state(), AppearanceHistory()
    damaged: Any
    for damaged in ({}, [], state[:1], [{key: 1.0}] * len(state), [*state[:-1], {**state[-1], key: "1"}]):
        with pytest.raises((TypeError, ValueError)):
            kept.restore(damaged)
    assert kept.changes[0].cause == "content"


def test_remedies_stand_with_their_gains_the_largest_first() -> None:
    why = explanation(history("dark"), 8.0, 1.5, {"night": 0.5, "fog": 9.0}, 2.0, is_faithful=False)
    named = [(each.remedy, each.gain_db, each.detail) for each in why.remedies]
    assert named == [
        ("recalibrate", 8.0, ""),
        ("switch regime", 7.5, "night"),
        ("restore exposure", 6.0, ""),
        ("raise precision", 1.5, ""),
    ]


def test_each_gain_is_a_receipt_in_fidelity_too_where_that_can_be_said() -> None:
    why = explanation(
        history("blur"), 8.0, 1.5, {}, None, False, lambda gain_db: Interval(gain_db / 100.0, 0.0, 1.0, 24)
    )
    assert [(each.remedy, each.gain and each.gain.estimate) for each in why.remedies] == [
        ("clean or focus the lens", None),
        ("recalibrate", 0.08),
        ("raise precision", 0.015),
    ]
    assert why.remedies[0].gain_db is None


@pytest.mark.parametrize(
    ("now", "is_faithful", "retrains"),
    [(0.5, True, True), (0.5, False, False), (0.85, True, False), (math.nan, True, False)],
)
def test_retraining_is_named_where_the_float_model_itself_has_become_unsure(
    now: float, is_faithful: bool, retrains: bool
) -> None:
    why = explanation(history("nothing", 0.9, now), 4.0, 1.0, {}, None, is_faithful)
    assert ("retrain" in [each.remedy for each in why.remedies]) is retrains


def test_frames_are_relit_until_there_are_enough() -> None:
    relighting, image = Relighting(2.0), np.full((2, 2, 3), 100, np.uint8)
    assert relighting.relit(image).max() == 200
    assert Relighting(0.3).relit(image).max() == 30
    assert Relighting(9.0).relit(image).min() == 255
    seen = {"tensor": abs_histogram(np.ones(4, np.float32))}
    assert [relighting.add(seen) is None for _ in range(4)] == [True, True, True, False]
