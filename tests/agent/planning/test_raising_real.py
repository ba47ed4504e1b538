"""Raising precision on a real network: the one group that ruins yolox_nano is found among 109."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import pytest
from lab import COCO, Lab
from raising_world import count_macs

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import calibrate, open_model
from agent.planning.ladder import Ladder, LadderOptions, Scene
from agent.planning.raising import PrecisionRaise
from agent.planning.what_if import WhatIf
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from calibrate.histogram import AbsHistogram, merge_into
from engines.interface import silent
from engines.registry import open_backend


@pytest.mark.trial
@pytest.mark.slow
def test_measured_it_is_one_group_of_yolox_nano_and_most_of_the_work_stays_int8(lab: Lab) -> None:
    model, runtime = open_model(load_model_spec(lab.spec("yolox_nano"))), open_backend("onnxruntime")
    frames, seen = [], dict[str, AbsHistogram]()
    with closing(runtime.observer(model.reference, model.placement.taps)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for _, image in islice(read_images(parse_source(str(lab.data / COCO))), 72):
            frames.append(task.preprocess(image)[0].copy())
            if len(frames) <= 40:
                merge_into(seen, observer.observe(frames[-1]).histograms)
    calibration = calibrate(model, seen, "entropy", 40, "test")
    asked, scene = WhatIf(model, calibration, [frames[48:]], runtime), Scene(calibration, frames[:8], [frames[40:48]])
    loss = asked.evaluate(model.plan).loss
    raised = {}
    for how, budget_s in (("measured", 300.0), ("predicted", 0.0)):
        options = LadderOptions(1.0, budget_s, PrecisionRaise(1, 1.0 - loss))
        found = Ladder(model, model.plan, scene, {}, runtime, options, silent, count_macs)
        plan = next(found.plans())
        raised[how] = found.findings.tried[-1].int8_macs_share, asked.evaluate(plan).loss
        noise = sorted(group["sensitivity"] for group in plan.evidence["groups"])
        print(f"{how}: {len(plan.floats)} float, {raised[how][0]:.1%} of MACs in INT8, loss {raised[how][1]:.2f}")
        if how == "measured":
            assert len(noise) == 109
            assert noise[-1] > 0.5 * sum(noise)
    assert raised["measured"][0] > 0.9 > raised["predicted"][0]
    assert raised["measured"][1] < 0.5 * loss
