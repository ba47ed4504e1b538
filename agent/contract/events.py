"""Define the kinds of events: when each is sent, and the fields of its detail.

The daemon reports these kinds only, which mypy checks, and the reference of events is written from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Part = Literal["observer", "labelling", "results", "report", "commands", "control", "answers"]
EventKind = (
    Literal[
        "alarm",
        "drift",
        "cause",
        "fidelity",
        "class",
        "view",
        "reference",
        "labelled",
        "job",
        "swap",
        "commit",
        "rollback",
        "regime",
        "policy",
        "store",
        "camera",
        "preview",
        "error",
    ]
    | Part
)


@dataclass(frozen=True)
class EventFacts:
    """One kind of event.

    Args:
        sent: When it is sent.
        fields: The meaning of each field of the detail. Fields without a value are null or absent.
        is_alarm: It is written to the disk at once, and dropped last when the outbox is full.
    """

    sent: str
    fields: Mapping[str, str] = field(default_factory=dict)
    is_alarm: bool = False


_CAMERA = {"camera": "Name of the camera."}
_DRIFT = {
    "capture_ts": "Capture time in seconds at which this state began.",
    "gain_db": "Noise in dB that a recalibration would save now.",
    "gain": "Fidelity that a recalibration is expected to gain: estimate, low, high, n; null if it is not known.",
    "e_value": "Evidence that a recalibration is worth it; it begins at 1 and rises to the limit of an alarm.",
    "clipping_share": "Share of the noise that comes from clipping, 0 to 1; the rest comes from rounding.",
}
_VIEW = {
    "trouble": "`blind`, `moved`, `blurred` or `frozen`; empty once the trouble is over.",
    "luminance": "Mean brightness of the frame, 0 to 255.",
    "contrast": "Standard deviation of the brightness over the cells of a coarse grid, 0 to 255.",
    "alike": "Likeness of the frame to the usual view, up to 1.",
    "sharpness": "Sharpness as a share of the usual sharpness.",
}
_ENGINE = {
    "artefact": "Id of the engine's artefact.",
    "trigger": "Trigger of the job, as in the event `job`.",
}
_FIRST_FRAME = {"capture_ts": "Capture time in seconds of the first frame that the engine answered, or null."}
_POLICY = {"policy": "Policy of the engine that serves now; absent if it has none."}
_SWAPPED = {
    "seconds": "Wall time in seconds from the trigger to the swap.",
    "fidelity": "Fidelity of the new engine on the held-out frames of the job, 0 to 1.",
    "fidelity_before": "Fidelity of the previous engine on the same frames.",
    "skipped": "Frames that nobody took between the last one of the previous engine and the first of the new.",
    "latency_ms": "Median latency of the new engine in the job, in milliseconds.",
    "latency_float_ms": "Median latency of the float engine on the same frames; null if INT8 had served.",
}
_BACK = {"state": "`back`"}

# The parts of the daemon whose errors it survives, and what works again. A part's return is the kind of its name, as
# subscribers know it: all seven are one event with the part as its kind.
PARTS: Mapping[Part, str] = {
    "observer": "Frames are observed",
    "labelling": "Frames are drawn for labelling",
    "results": "An output of results works",
    "report": "Telemetry is sent",
    "commands": "Commands are received",
    "control": "Jobs and switches are decided",
    "answers": "Served answers are handed to the observer",
}


def _back(part: Part) -> Mapping[str, str]:
    return {"output": "Name of the output, for `results`.", **_BACK} if part == "results" else _BACK


EVENTS: Mapping[EventKind, EventFacts] = {
    "alarm": EventFacts(
        "The evidence for a recalibration has passed the limit.",
        {
            **_CAMERA,
            "onset_ts": "Capture time in seconds at which the change began, as estimated.",
            **_DRIFT,
            **_VIEW,
            "trouble": "Trouble with the view that explains the alarm; no job answers it then. Absent without trouble.",
        },
        is_alarm=True,
    ),
    "drift": EventFacts(
        "The drift of a camera has become `calm` or `warning`.", {**_CAMERA, "state": "`calm` or `warning`.", **_DRIFT}
    ),
    "cause": EventFacts(
        "After an alarm: the changes in the view, and the gain of each remedy.",
        {
            **_CAMERA,
            "changes": "List of `cause` (light, contrast, noise, blur or content) and its size in `octaves`.",
            "remedies": "List of `remedy`, `gain_db` in dB, `gain` in fidelity and `detail`; the largest gain first.",
        },
    ),
    "fidelity": EventFacts(
        "The fidelity is below the accepted one with 95 % confidence, although the scales fit; once for each engine.",
        {
            **_CAMERA,
            "state": "`low`",
            "since": "Capture time in seconds of the first frame that counts.",
            "gain_db": "Noise in dB that a recalibration would save.",
            "accepted": "The accepted fidelity: 1 - `recalibration.max_loss`.",
            "estimate": "Mean fidelity, 0 to 1.",
            "low": "Lower bound of the fidelity.",
            "high": "Upper bound of the fidelity.",
            "n": "Frames behind the estimate.",
        },
        is_alarm=True,
    ),
    "class": EventFacts(
        "INT8 loses more objects of one class than it may; once for each engine and class.",
        {
            **_CAMERA,
            "name": "Name of the class.",
            "instead": "Class that most often stands in its place; null if the objects are missed.",
            "loss": "Share of the objects that are lost, 0 to 1.",
            "tolerance": "Share that may be lost, 0 to 1.",
            "examples": "Up to three frames: `frame`, `ts` (capture time in seconds) and `served`, the class answered.",
        },
        is_alarm=True,
    ),
    "view": EventFacts(
        "A camera's view has a trouble that no recalibration cures, or has it no longer.",
        {**_CAMERA, **_VIEW, "gain_db": "Noise in dB that a recalibration would save."},
        is_alarm=True,
    ),
    "reference": EventFacts(
        "The float reference does not compute what ONNX Runtime computes. ONNX Runtime takes its place.",
        {
            "state": "`wrong`",
            **_CAMERA,
            "frame": "Number of the frame.",
            "output": "Output of the model that differs.",
            "tensor": "First tensor inside the graph that differs.",
            "sqnr_db": "Signal-to-noise ratio of the reference against ONNX Runtime in dB.",
            "allowed_db": "Least ratio that the arithmetic explains, in dB.",
            "in_batch": "True if only a frame in a batch is wrong.",
            "message": "The event in a sentence.",
        },
        is_alarm=True,
    ),
    "labelled": EventFacts(
        "Labels of drawn frames have come, or have become doubtful.",
        {
            "labels": "Drawn frames with a label that count.",
            "waiting": "Drawn frames without a label.",
            "skipped": "Drawn frames of which nobody could say what they show.",
            "suggested": "Labels that began as the reference's answer.",
            "doubt": "Why the labels are no random sample; empty if nothing speaks against it.",
            "overall": "`accuracy`, `reference` and `int8_loss`, each as estimate, low, high and n.",
            "cameras": "The same by camera.",
            "regimes": "The same by the engine that answered, for at most 16 engines.",
            "classes": "Precision and recall by class, for at most 16 classes.",
        },
    ),
    "job": EventFacts(
        "A job has reached a step or ten more percent of it, or has ended. A failed job sends `error` instead.",
        {
            "trigger": "`first-start`, `alarm`, `precision`, `schedule`, `command`, `model`, `runtime`, `switch`, "
            "`rollback`, or `start` while the reference is built.",
            "step": "REQUESTED, COLLECTING, CALIBRATING, PLANNING, BUILDING, VALIDATING, PROBATION, COMMITTED or "
            "CANCELLED.",
            "percent": "Progress of the step, 0 to 100.",
            "engine": "Title of the engine that is built at a start.",
            "artefact": "Id of the engine on probation.",
            "waits": "Why the job stands still for want of headroom; `no more` once it goes on.",
            "selection": "How the frames were chosen: considered, taken, left out by reason and held out, with their "
            "brightness and classes.",
            "message": "A remark, or why the job was cancelled.",
        },
    ),
    "swap": EventFacts(
        "A candidate serves from now on, on probation.",
        {
            **_FIRST_FRAME,
            **_ENGINE,
            **_SWAPPED,
            **_POLICY,
        },
        is_alarm=True,
    ),
    "commit": EventFacts(
        "A candidate has passed its probation and is `current`.",
        {
            **_ENGINE,
            "frames": "Frames of the probation.",
            "seconds": "Length of the probation in seconds.",
            "late": "Frames that were answered late.",
            "fidelity_frames": "Observed frames behind the fidelity that was judged.",
            "p99_judged": "True if there were enough frames to judge the 99th percentile of the latency.",
            "policy_before": "Policy of the previous engine, which the new one does not inherit. Absent without one.",
            "policy_command": "Command that hands this policy on.",
        },
        is_alarm=True,
    ),
    "rollback": EventFacts(
        "The previous engine serves again; or, with the trigger `rollback`, the operator has chosen an earlier engine "
        "and the fields are those of `swap`.",
        {
            "capture_ts": "Capture time in seconds of the first frame of the engine that serves now, or null.",
            "artefact": "Id of the candidate that was taken out of service; of a `swap`, of the engine that serves.",
            "trigger": "Trigger of the job, as in the event `job`.",
            "reason": "Code of the error.",
            "frames": "Frames that the candidate had answered.",
            "suffered": "Frames that were answered late or wrongly, or would have been.",
            "missed": "Frames that nobody took during the probation.",
            "message": "The error in a sentence.",
            **dict.fromkeys(_SWAPPED, "As in `swap`."),
            **_POLICY,
        },
        is_alarm=True,
    ),
    "regime": EventFacts(
        "A calibration has proved itself and is kept for its light.",
        {
            "artefact": "Id of the engine's artefact.",
            "known": "Number of regimes that are kept.",
            **_POLICY,
        },
    ),
    "policy": EventFacts(
        "The command `policy` has changed the policy of an engine.",
        {"artefact": "Id of the engine's artefact.", "policy": "The policy; null once it is removed."},
    ),
    "store": EventFacts(
        "Engines or caches that are no longer needed were removed.",
        {
            "state": "`tidied`",
            "removed": "Ids of the artefacts, and names of the caches.",
            "freed_bytes": "Bytes that were freed.",
        },
    ),
    "camera": EventFacts(
        "A camera that was lost delivers again. The loss itself is an event `error`.",
        {**_CAMERA, **_BACK},
    ),
    "preview": EventFacts("Viewers can reach the preview.", {"state": "`open`", "address": "Where it listens."}),
    "error": EventFacts(
        "The daemon has met an error and goes on.",
        {
            "code": "Code of the error, as in the [list of errors](errors.md).",
            "message": "The error in a sentence: found, expected, remedy.",
            "trigger": "Trigger of the job that has failed.",
            "step": "FAILED or ROLLED_BACK, for a job.",
            **_CAMERA,
            "part": "Part of the daemon that has failed: one [that returns](#back), `preview`, `history` or `labels`.",
            "output": "Name of the output, for results.",
            "count": "Number of labels, for `labels`.",
        },
        is_alarm=True,
    ),
    **{part: EventFacts(f"{works} again after an error.", _back(part)) for part, works in PARTS.items()},
}
assert EVENTS.keys() == {kind for each in get_args(EventKind) for kind in get_args(each)}
ALARM_KINDS = frozenset(kind for kind, facts in EVENTS.items() if facts.is_alarm)
