"""Raising precision on a real network: the one group that ruins yolox_nano is found among 109."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import pytest
from lab import COCO, Lab

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import calibrate, open_model
from agent.planning.precision_raise import ObservedScene, PrecisionRaise, PrecisionRaiser
from agent.planning.what_if import WhatIf
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from calibrate.histogram import AbsHistogram, merge_into
from engines.interface import silent
from engines.registry import open_backend


@pytest.mark.trial
@pytest.mark.slow
def test_measured_it_is_one_group_of_yolox_nano_and_predicted_it_would_be_dozens(lab: Lab) -> None:
    model, runtime = open_model(load_model_spec(lab.spec("yolox_nano"))), open_backend("onnxruntime")
    frames, seen = [], dict[str, AbsHistogram]()
    with closing(runtime.observer(model.reference, model.placement.taps)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for _, image in islice(read_images(parse_source(str(lab.data / COCO))), 72):
            frames.append(task.preprocess(image)[0].copy())
            if len(frames) <= 40:
                merge_into(seen, observer.observe(frames[-1]).histograms)
    calibration = calibrate(model, seen, "entropy", 40, "test")
    asked = WhatIf(model, calibration, frames[48:], runtime)
    loss, raised = asked.evaluate(model.plan).loss, {}
    for how, tried in (("measured", frames[40:48]), ("predicted", [])):
        search = PrecisionRaiser(model, ObservedScene(seen, calibration, tried), {}, runtime, silent)
        plan = search.plan(PrecisionRaise(1, 1.0 - loss, 300.0))
        raised[how] = len(plan.floats), asked.evaluate(plan).loss
    assert len(search.grouping.groups) == 109
    (groups, measured), (more, predicted) = raised["measured"], raised["predicted"]
    print(f"INT8 {loss:.2f}; measured, {groups} float: {measured:.2f}; predicted, {more} float: {predicted:.2f}")
    assert groups <= 2 < 20 < more
    assert measured < 0.5 * loss
    assert measured < 0.5 * predicted
