"""The details of the examples of events."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from agent.contract.events import PARTS, EventKind

_ENGINE, _NEWER = "3f9a2c71d0e4b586", "8c04be17a95d2f63"
_GAIN: JsonValue = {"estimate": 0.12, "low": 0.04, "high": 0.2, "n": 24}
_SCORES: JsonValue = {
    "accuracy": {"estimate": 0.91, "low": 0.84, "high": 0.95, "n": 96},
    "reference": {"estimate": 0.93, "low": 0.87, "high": 0.97, "n": 96},
    "int8_loss": {"estimate": 0.02, "low": -0.01, "high": 0.06, "n": 96},
}
_DRIFT: dict[str, JsonValue] = {
    "camera": "street",
    "capture_ts": 1795322760.0,
    "gain_db": 5.2,
    "gain": _GAIN,
    "e_value": 5130.4,
    "clipping_share": 0.71,
}
_SWAP: dict[str, JsonValue] = {
    "capture_ts": 1795322774.1,
    "artefact": _NEWER,
    "trigger": "alarm",
    "seconds": 41.7,
    "fidelity": 0.97,
    "fidelity_before": 0.81,
    "skipped": 0,
    "latency_ms": None,
    "latency_float_ms": None,
}

DETAILS: Mapping[EventKind, dict[str, JsonValue]] = {
    "alarm": {**_DRIFT, "onset_ts": 1795322731.0},
    "drift": {**_DRIFT, "state": "warning", "e_value": 40.2},
    "cause": {
        "camera": "street",
        "changes": [{"cause": "light", "octaves": -2.3}],
        "remedies": [{"remedy": "recalibrate", "gain_db": 5.2, "gain": _GAIN, "detail": None}],
    },
    "fidelity": {
        "camera": "street",
        "state": "low",
        "since": 1795322101.0,
        "gain_db": 0.4,
        "accepted": 0.9,
        "estimate": 0.83,
        "low": 0.79,
        "high": 0.87,
        "n": 310,
    },
    "class": {
        "camera": "street",
        "name": "bus",
        "instead": "truck",
        "loss": 0.31,
        "tolerance": 0.08,
        "examples": [{"frame": 10412, "ts": 1795322770.4, "served": "truck"}],
    },
    "view": {"camera": "street", "trouble": "blurred", "gain_db": 1.1, "alike": 0.93, "sharpness": 0.38},
    "reference": {
        "state": "wrong",
        "camera": "street",
        "frame": 10412,
        "output": "output",
        "tensor": "conv_17",
        "sqnr_db": 11.2,
        "allowed_db": 38.0,
        "in_batch": False,
        "message": "the float reference is not what ONNX Runtime computes; ONNX Runtime observes from now on",
    },
    "labelled": {
        "labels": 112,
        "waiting": 9,
        "skipped": 2,
        "suggested": 80,
        "doubt": "",
        "overall": _SCORES,
        "cameras": {"street": _SCORES},
        "regimes": {_ENGINE: _SCORES},
        "classes": {},
    },
    "job": {"trigger": "alarm", "step": "CALIBRATING", "percent": 40},
    "swap": _SWAP,
    "commit": {
        "artefact": _NEWER,
        "trigger": "alarm",
        "frames": 1794,
        "seconds": 60.0,
        "late": 0,
        "fidelity_frames": 61,
        "p99_judged": True,
    },
    "rollback": {
        "capture_ts": 1795322781.3,
        "artefact": _NEWER,
        "trigger": "alarm",
        "reason": "probation.slow",
        "frames": 212,
        "suffered": 3,
        "missed": 0,
        "message": "probation.slow: a median of 31 ms; expected at most 24 ms; check what else runs on the board",
    },
    "regime": {"artefact": _ENGINE, "known": 2},
    "policy": {"artefact": _ENGINE, "policy": {"score_threshold": 0.45}},
    "store": {"state": "tidied", "removed": [_ENGINE], "freed_bytes": 4812376},
    "camera": {"camera": "street", "state": "back"},
    "preview": {"state": "open", "address": "127.0.0.1:8090"},
    "error": {
        "code": "camera.lost",
        "message": "camera.lost: rtsp://cam/1 stopped; expected a stream without an end; check the camera",
        "camera": "street",
    },
    **{part: {"state": "back"} for part in PARTS},
    "results": {"output": "file", "state": "back"},
}
