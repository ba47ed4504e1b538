"""The evidence of a plan with figures that can be checked by hand: six groups in a row, three candidates."""

from __future__ import annotations

from typing import Any


def group(name: str, sensitivity: float, **changes: Any) -> dict[str, Any]:
    """In INT8, at half the time of float, but for `changes`."""
    return {
        "name": name,
        "layers": [name],
        "macs_share": 0.16,
        "precision": "int8",
        "why": "its noise is within the budget",
        "time_int8": 0.5,
        "time_float": 1.0,
        "nsr_db": -30.0,
        "sensitivity": sensitivity,
        "measured": False,
        "repairs": [],
        "rule": "",
        "timed": True,
        **changes,
    }


def trial(loss: float, upper: float, **changes: Any) -> dict[str, Any]:
    """Accepted, on 140 frames, 20.1 ms against 12.2 ms in float, but for `changes`."""
    found = {
        "loss": loss,
        "upper": upper,
        "lower": 0.0,
        "frames": 140,
        "empty_frames": 3,
        "latency_ms": 20.1,
        "latency_float_ms": 12.2,
        "confused": [],
        "accepted": True,
        "reason": f"its loss is at most {upper}",
        **changes,
    }
    return {**found, "by_source": {"clip.mp4": found}}


def candidate(time: float, tried: dict[str, Any] | None, loss: float = 0.015) -> dict[str, Any]:
    found = {"time": time, "noise": 0.4, "predicted_loss": loss, "int8_macs_share": 0.84, "floats": 1}
    return {"plan": f"plan of {time} ms", **found, "offered": True, "outcome": "", "trial": tried}


def evidence() -> dict[str, Any]:
    """The groups' noise sums to 1; stem and head are repaired and float; the third candidate was not tried."""
    pair = {"reference": "truck", "candidate": "car", "count": 19, "of": 60, "low": 0.17}
    head = {"precision": "float", "why": "it adds most of the noise", "measured": True}
    groups = [
        group("stem", 0.2, repairs=["equalised over 16 channels", "threshold mse"]),
        group("mid_1", 0.18, layers=["mid_1", "mid_1b"], rule="keep_int8: mid_1"),
        group("head", 0.6, time_float=1.4, nsr_db=-1.5, **head),
        group("mid_2", 0.012),
        group("tail_1", 0.005, nsr_db=None),
        group("tail_2", 0.003),
    ]
    return {
        "by": "tared plan",
        "model": "ab" * 32,
        "model_name": "yolox_nano.onnx",
        "calibration": "c0ffee",
        "built_for": {"runtime": "onnxruntime", "version": "1.23.2"},
        "schema": 4,
        "spec_id": "5bec",
        "plan": "91a9",
        "int8_macs_share": 0.84,
        "sensed": True,
        "live": False,
        "held_out": True,
        "float_precision": "fp32",
        "source": "clip.mp4",
        "seed": 0,
        "max_loss": 0.05,
        "max_confusion": 0.1,
        "costs": {
            "source": "measured",
            "why": "",
            "unit": "ms",
            "noise": 0.03,
            "builds": 8,
            "fixed": 1.0,
            "passes": 1,
            "doubt": "",
        },
        "groups": groups,
        "edges": [[0, 1, 0.02], [1, 2, 0.25], [2, 3, 0.15], [3, 4, 0.02], [4, 5, 0.02]],
        "candidates": [
            candidate(4.6, trial(0.081, 0.19, accepted=False, reason="it confuses classes", confused=[pair]), 0.3),
            candidate(5.3, trial(0.0204, 0.0487)),
            candidate(5.9, None, 0.0),
        ],
        "chosen": 1,
        "retraining": {
            "loss": 0.0204,
            "noisiest": [{"name": "stem", "noise_share": 0.5}, {"name": "mid_1", "noise_share": 0.45}],
            "target": {
                "names": ["head"],
                "layers": ["head"],
                "macs_share": 0.16,
                "time_ratio": 0.755,
                "time_ms": 4.0,
                "plan_time_ms": 5.3,
                "loss": 0.3,
                "plan_loss": 0.015,
                "to_win": 0.285,
            },
        },
        "verdict": "INT8 in 5 of 6 groups loses at most 0.0487, and is slower than float here.",
        "certificate": {"error_probability": 0.05, "frames_needed": 104},
        "latency_ms": 20.1,
        "latency_float_ms": 12.2,
        "faster": False,
        "labels": {"dataset": "coco.zip", "float": {"map": 0.34}, "plan": {"map": 0.335}},
        "frame_counts": {"to_search": 32, "to_certify": 140},
        "builds": 9,
        "seconds": 81.0,
        "interrupted": "",
    }


def all_float() -> dict[str, Any]:
    """Every candidate was refused; nothing was timed."""
    found = evidence()
    for one in found["groups"]:
        one.update(precision="float", why="no plan was accepted")
    found["candidates"] = found["candidates"][:1]
    found.update(chosen=None, int8_macs_share=0.0, verdict="Every layer stays float.")
    found.update(latency_ms=None, latency_float_ms=None)
    return found


def by_macs() -> dict[str, Any]:
    """The same plan where times were noise: all float costs 6.4 million multiply-accumulates."""
    found = evidence()
    found["costs"].update(source="macs", why="the measured times were noise", unit="MACs", fixed=0.0)
    found["retraining"]["target"].update(time_ms=None, plan_time_ms=None)
    return found


def unmeasured() -> dict[str, Any]:
    """A plan that nothing was tried of: only predictions."""
    found = evidence()
    for one in found["candidates"]:
        one["trial"] = None
    for one in found["groups"]:
        one.update(measured=False)
    found.update(sensed=False, chosen=None, labels=None, latency_ms=None, latency_float_ms=None, interrupted="budget")
    return found


def of_a_job() -> dict[str, Any]:
    """The same plan as a job writes it: its engines had verdicts, and no certificate."""
    found = evidence()
    keys = ("schema", "model", "model_name", "calibration", "max_loss", "costs", "sensed", "groups", "edges", "seconds")
    tried = [{**candidate(4.6, None, 0.3), "outcome": "fidelity 0.7"}, candidate(5.3, None, 0.01)]
    return {**{key: found[key] for key in keys}, "by": "job", "candidates": tried, "chosen": None}


def one_group() -> dict[str, Any]:
    found = evidence()
    return {**found, "groups": found["groups"][:1], "edges": [], "candidates": [], "chosen": None}
