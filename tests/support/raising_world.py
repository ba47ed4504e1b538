"""A small world whose model INT8 destroys though every scale is right: two halves of one tensor, a thousand apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import yaml
from onnx import ModelProto
from worlds import FPS, SPEC, World, make_world
from zoo import Net

from agent.collection.collection import CalibrationSet, SharedCollection
from agent.common.schema import validate
from agent.config import Config
from agent.models.model import Model, calibrate
from agent.monitoring.camera_monitor import CameraMonitor, CameraState, Spending
from agent.monitoring.drift import DriftMonitor, Regime
from agent.monitoring.estimates import Estimate
from agent.planning.costs import GroupCosts
from agent.planning.ladder import Scene
from calibrate.statistics.evidence import Interval
from engines.quantise.costs import macs_costs
from engines.quantise.fusion import Grouping
from engines.registry import open_backend

COLLAPSES = "Conv_t3"  # reads the tensor whose quiet half is less than half a step
PRECISION_COMMIT = "event=commit .*trigger=precision"


def count_macs(grouping: Grouping, *_: object) -> GroupCosts:
    """Costs for a ladder that is to measure none."""
    return GroupCosts(macs_costs(grouping), "asked for")


def collapsing_net(kernel: int = 1) -> ModelProto:
    """Says class 1 of a bright image and class 0 of a dark one; in INT8 always class 0, whatever is repaired.

    kernel: side of the first layer's, which is odd: how much work the layer is that INT8 suits.
    """
    net = Net()
    inside = 1.0 - (kernel // 2) * (kernel // 2 + 1) / (
        8.0 * kernel
    )  # share of the kernel's rows that lie in the image, on the average
    first = net.constant(np.full((1, 3, kernel, kernel), 1.0 / (3.0 * (inside * kernel) ** 2), np.float32))
    level = net.node("Conv", "image", first, pads=[kernel // 2] * 4)
    loud = net.node("Mul", level, net.constant(np.array(1000.0, np.float32)))
    pair = net.node("Concat", level, loud, axis=2)
    taken = net.node("Conv", pair, net.constant(np.ones((1, 1, 1, 1), np.float32)))
    height = [net.constant(np.array([value], np.int64)) for value in (0, 8, 2)]
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.node("Slice", taken, *height)))
    bright = np.array([[0.0], [1.0], [0.0], [0.0], [0.0]], np.float32)
    bias = np.array([0.17, 0.0, -9.0, -9.0, -9.0], np.float32)
    return net.model(net.node("Gemm", pooled, net.constant(bright), net.constant(bias), transB=1))


def scene_of(model: Model, brighter: float = 1.0) -> Scene:
    """Dark images and bright ones in turn. brighter: of all that calibrates, not of the frames that propose and try."""
    rng, runtime = np.random.default_rng(0), open_backend("onnxruntime")
    images = [(rng.uniform(size=(1, 3, 8, 8)) * (0.2 if n % 2 else 0.5)).astype(np.float32) for n in range(24)]
    collection = CalibrationSet(held_out_size=0)
    with closing(model.open_observer(runtime)) as observer:
        for image in images[:16]:
            collection.add(image, observer.observe(image * np.float32(brighter)))
    calibration = calibrate(model, collection.histograms, "max", 16, "test", runtime, collection.extremes)
    return Scene(calibration, images[:8], [images[16:]])


def raising_world(
    folder: Path, max_loss: float, precision: Mapping[str, Sequence[str]] | None = None, light: float = 0.5
) -> World:
    """A dark frame, then three bright ones. A `max_loss` of 1 lets its first INT8 engine serve, whatever it loses."""
    world = make_world(folder, lambda ts: light * (1.0 if round(ts * FPS) % 4 else 0.4), 900.0)
    onnx.save(collapsing_net(7), folder / "model.onnx")
    (folder / "model.yaml").write_text(yaml.safe_dump({**SPEC, "precision": dict(precision or {})}))
    world.config["observe"]["period_s"] = 0.2
    world.config["calibration"]["method"] = "max"
    world.config["recalibration"].update(max_loss=max_loss, cooldown_s=0.0)
    return world


def config_in(folder: Path, **sections: object) -> Config:
    """Return the configuration of a camera with its model and state in a folder."""
    content = {
        "model": {**SPEC, "path": folder / "model.onnx"},
        "camera": {"source": "rtsp://camera"},
        "state_dir": folder / "state",
    }
    return validate(Config, {**content, **sections}, "test")


def config_of(**recalibration: object) -> Config:
    """Return the configuration of a camera, with defaults but for these settings."""
    content = {"model": SPEC, "camera": {"source": "rtsp://camera"}, "recalibration": recalibration}
    return validate(Config, content, "test")


def observer_state(
    config: Config,
    fidelity: tuple[float, float, int] = (0.4, 0.6, 200),
    *,
    serving_db: float = 0.5,
    drift: str = "calm",
    switch_to: str = "",
    trouble: str = "",
    outage: str = "",
) -> CameraState:
    """Return a camera's state. fidelity: low, high, frames. drift: empty where nothing is calibrated."""
    low, high, n = fidelity
    known = DriftMonitor(config.drift, config.regimes.switch_db, Regime("", {}, {}, {})).state
    state = CameraMonitor(config.model, config, SharedCollection(config.model, config)).state(
        outage, Spending(0.0, 0.0)
    )
    return replace(
        state,
        settled=Estimate(Interval((low + high) / 2, low, high, n), 0, 0.0),
        drift=replace(known, serving_db=serving_db, state=drift, switch_to=switch_to) if drift else None,
        view=replace(state.view, trouble=trouble),
    )


def observing(config: Config, state: CameraState) -> SimpleNamespace:
    """An observer of one camera that has found this. Its `paces` note whether it observed at the alert pace."""
    gathering = SharedCollection(config.model, config)
    paces: list[bool] = []
    return SimpleNamespace(
        monitors={"camera": CameraMonitor(config.model, config, gathering)},
        collection=gathering,
        paces=paces,
        set_pace=lambda alert: paces.append(alert),
        measured=None,
        states=lambda: {"camera": state},
    )
