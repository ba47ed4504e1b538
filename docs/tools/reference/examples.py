"""Examples of the documents of the MQTT contract: the real types make them, and the code that reads them reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, JsonValue

from agent.commands.dispatcher import parse_command
from agent.contract.board_status import BoardStatus, DriftStatus
from agent.contract.commands import OPS, Command, CommandResult, Desired, Failure, Labels, Release, Reported
from agent.contract.events import EventKind
from agent.contract.histograms import ChunkHead, Facts
from agent.contract.messages import (
    Accuracy,
    Ack,
    Birth,
    Bounds,
    CameraTelemetry,
    Document,
    Dropped,
    Event,
    FidelityReport,
    LabelledAccuracy,
    Latency,
    Observing,
    Status,
    Telemetry,
)
from docs.tools.reference.markdown import as_json

TS = 1795322774.2
_EPOCH = 1795322701
_TO = "plant/gate-3"
_SHA256 = "5b1d3c4e" * 8
_ENGINE, _NEWER = "3f9a2c71d0e4b586", "8c04be17a95d2f63"


def command_example(op: str) -> str:
    """Return a command in JSON; the code that admits commands has read it."""
    document = {
        "id": f"{op}-1",
        "op": op,
        "args": OPS[op].example,
        "issued": TS,
        "expires": TS + 60.0,
        "version": int(TS * 1000),
        "to": _TO,
    }
    parse_command(json.dumps(document).encode(), TS)
    return as_json(document)


def event_example(kind: EventKind, detail: Mapping[str, JsonValue]) -> str:
    """Return an event in JSON."""
    return _written(Event(epoch=_EPOCH, seq=716, ts=TS, kind=kind, detail=dict(detail)))


def _written(document: Document) -> str:
    """Return a document in JSON, which its own reader understands in the same way."""
    payload = document.to_json()
    if type(document).from_json(payload) != document:
        raise ValueError(f"{type(document).__name__} is not what it was before it was sent: {payload!r}")
    return as_json(json.loads(payload))


def _strict(model: type[BaseModel], content: dict[str, Any]) -> str:
    """Return a document of a strict type in JSON."""
    model.model_validate(content)
    return as_json(content)


_DRIFT = DriftStatus(
    judged=True,
    gain_db=0.3,
    serving_db=0.3,
    clipping_share=0.1,
    e_value=1.0,
    state="calm",
    onset_ts=None,
    switch_to="",
    closely=False,
    gains_db={_ENGINE: 0.3},
    gain=None,
)
_STATUS = BoardStatus(
    camera="street",
    up=True,
    lost=None,
    fidelity=Bounds(estimate=0.96, low=0.93, high=0.98, n=412),
    fidelity_hour=FidelityReport(estimate=0.97, low=0.91, high=0.99, n=138, empty=9),
    accuracy=Accuracy(estimate=0.0, low=0.0, high=1.0, n=0, empty=0),
    drift=_DRIFT,
    view="good",
    engine=_ENGINE,
    backend="tensorrt",
    degraded=False,
    degraded_reason=None,
    held_back=None,
    held_back_code=None,
    raised=False,
    frames=107892,
    regimes=2,
    regime_artefacts=[_ENGINE, _NEWER],
    policy=None,
    policies={},
    observer="observing",
    automatic=True,
    stopped_by="",
    job=None,
    preview=None,
)


def _camera() -> CameraTelemetry:
    return CameraTelemetry(
        fps=29.97,
        up=True,
        dropped={"overwritten": 3},
        latency_ms=Latency(p50=11.8, p99=14.2),
        published_ms=Latency(p50=12.6, p99=15.9),
        drift=_DRIFT.in_telemetry(3.0),
        fidelity=FidelityReport(estimate=0.96, low=0.93, high=0.98, n=412, empty=31),
        fidelity_hour=FidelityReport(estimate=0.97, low=0.91, high=0.99, n=138, empty=9),
        observing=Observing(share=0.019, debt_s=0.0, state_bytes=5242880, audited=12),
    )


_LABELLED = LabelledAccuracy(
    labels=112,
    waiting=9,
    skipped=2,
    accuracy=Bounds(estimate=0.91, low=0.84, high=0.95, n=96),
    reference=Bounds(estimate=0.93, low=0.87, high=0.97, n=96),
    int8_loss=Bounds(estimate=0.02, low=-0.01, high=0.06, n=96),
)

DOCUMENTS: Mapping[type[BaseModel], Callable[[], str]] = {
    Status: lambda: _written(Status(state="online", session="6f1c", boot_id="b0c4", ts=TS)),
    Birth: lambda: _written(
        Birth(
            agent_version="0.2.0",
            hardware={"board": "NVIDIA Jetson Orin Nano Developer Kit"},
            runtimes={"tensorrt": "10.3.0"},
            commands={"operator_keys": ["9f86d081884c7d65"], "release_keys": []},
            model="yolox_nano",
            engine=_ENGINE,
            calibration="cal-17",
            precision="int8",
            int8_macs_share=0.98,
            regimes=[_ENGINE, _NEWER],
        )
    ),
    Telemetry: lambda: _written(
        Telemetry(
            epoch=_EPOCH,
            seq=715,
            ts=TS,
            cameras={"street": _camera()},
            health={"temperature_cpu_c": 51.0, "memory_available_bytes": 2147483648},
            labelled_accuracy=_LABELLED,
        )
    ),
    Event: lambda: event_example("regime", {"artefact": _ENGINE, "known": 2}),
    Dropped: lambda: _written(
        Dropped.model_validate({"epoch": _EPOCH, "from": 17, "to": 302, "kind": "telemetry", "n": 280})
    ),
    Reported: lambda: _written(Reported(version=1795322774000, values={"log_level": "debug"})),
    CommandResult: lambda: _written(
        CommandResult(
            id="recalibrate-1",
            status="FAILED",
            error=Failure(
                code="recalibration.refused",
                message="recalibration.refused: loss 0.31; expected at most 0.1; retrain the model",
            ),
        )
    ),
    BoardStatus: lambda: _written(_STATUS),
    Command: lambda: command_example("recalibrate"),
    Desired: lambda: _strict(
        Desired, {"version": 1795322774000, "values": {"log_level": "debug"}, "to": _TO, "expires": TS + 86400.0}
    ),
    Release: lambda: _strict(
        Release,
        {
            "kind": "release",
            "sha256": _SHA256,
            "size": 3671234,
            "version": 4,
            "issued": TS,
            "expires": TS + 90 * 86400.0,
            "name": "yolo.onnx",
        },
    ),
    Labels: lambda: _written(
        Labels.model_validate(
            {"camera": "street", "ts": TS, "labels": [{"class": "car", "box": [10.0, 20.0, 110.0, 80.0]}]}
        )
    ),
    Ack: lambda: _written(Ack(epoch=_EPOCH, upto=716)),
    ChunkHead: lambda: _written(ChunkHead(sha256=_SHA256, total=4)),
    Facts: lambda: _written(
        Facts(
            model="9f86d081",
            observed="884c7d65",
            method="entropy",
            frames=512,
            preprocessing={"color": "bgr", "resize": "letterbox"},
        )
    ),
}
