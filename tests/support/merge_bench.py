"""Boards without cameras: what their frames would have counted, and a board that sends it when it is asked."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from brokers import on_the_air
from device import Device
from numpy.typing import NDArray

from agent.commands.dispatcher import CommandDispatcher, bind
from agent.config import Config, PrivacyConfig
from agent.contract.histograms import Facts, write_upload
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.daemon.handlers import HistogramUpload
from agent.models.engine_service import EngineService
from agent.mqtt.endpoint import Endpoint
from agent.uplink.link import MqttLink
from calibrate.histogram import AbsHistogram, abs_histogram
from engines.calibration import Calibration, calibrate_histograms

MODEL = "ab" * 32
OBSERVED = "0" * 16
TENSORS = ("conv1", "conv2", "head")
FRAMES = 4
FACTS = Facts(model=MODEL, observed=OBSERVED, method="max", frames=FRAMES, shared=[["conv1", "conv2"]])
FLEET = "fleet"


def frames_of(seed: int, light: float = 1.0, values: int = 20_000) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a board: like any other's, in its own light."""
    rng = np.random.default_rng(seed)
    return {tensor: (light * rng.normal(size=values) * (n + 1)).astype(np.float32) for n, tensor in enumerate(TENSORS)}


def counted(data: dict[str, NDArray[np.float32]]) -> dict[str, AbsHistogram]:
    return {tensor: abs_histogram(values) for tensor, values in data.items()}


def calibration_of(histograms: dict[str, AbsHistogram]) -> Calibration:
    shared = (("conv1", "conv2"),)
    return calibrate_histograms(
        histograms, shared, model_sha256=MODEL, method="max", frames=FRAMES, source="a board's camera"
    )


def upload(folder: Path, device: str, histograms: dict[str, AbsHistogram], **changes: Any) -> Path:
    """The file of a board's upload."""
    path = folder / f"{device}.upload"
    path.write_bytes(write_upload(FACTS.model_copy(update=changes), histograms))
    return path


def service_with(calibration: Calibration | None) -> EngineService:
    planned = SimpleNamespace(placement=SimpleNamespace(shared=(("conv1", "conv2"),)), observed_id=OBSERVED)
    serving = SimpleNamespace(id="artefact")
    return cast(EngineService, SimpleNamespace(calibration=calibration, serving=serving, model=planned))


class Board:
    """A link, a command desk, and what its calibration has counted; its thread takes commands until it is left."""

    def __init__(self, link: MqttLink, calibration: Calibration | None, privacy: PrivacyConfig) -> None:
        self.link = link
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.service = service_with(calibration)
        config = cast(Config, SimpleNamespace(privacy=privacy))
        histograms = bind(lambda: config, HistogramUpload(self.service, link, self.posted.put))
        self._desk = CommandDispatcher({**Device().handlers(), **histograms}, link.send)

    def run(self, left: threading.Event) -> None:
        while not left.is_set():
            while not self.posted.empty():
                self.posted.get()()
            try:
                message = self.link.inbox.get(timeout=0.01)
            except queue.Empty:
                continue
            self._desk.receive(message.payload, time.time(), message.retain)


@contextmanager
def board(endpoint: Endpoint, device: str, calibration: Calibration | None, histograms: bool = True) -> Iterator[Board]:
    """On the air. histograms: whether its owner lets it send them."""
    left = threading.Event()
    with on_the_air(endpoint, Topics(FLEET, device), Birth(agent_version="0")) as link:
        link.set_state("online")
        there = Board(link, calibration, PrivacyConfig(histograms=histograms))
        thread = threading.Thread(target=there.run, args=(left,), name=f"board-{device}")
        thread.start()
        try:
            yield there
        finally:
            left.set()
            thread.join()


def merged_calibration(calibration: Calibration) -> Calibration:
    return replace(calibration, merged={"boards": {"a": 1}, "excluded": {}, "observed": OBSERVED})
