"""Define the answer to `status`: the board's state as one document. Real boards and simulated ones give it."""

from __future__ import annotations

from pydantic import Field, JsonValue

from agent.contract.messages import Accuracy, Bounds, Document, FidelityReport

_IN_TELEMETRY = ("state", "e_value", "gain_db", "serving_db", "clipping_share", "gain")  # fields of DriftStatus


class DriftStatus(Document):
    """How far the scene has left the calibration in service. Gains are of the latest block, 0 until one is judged.

    Args:
        judged: Whether a block was judged yet.
        gain_db: Noise in dB that a recalibration would save, over the known regime that fits best.
        serving_db: The same over the engine in service.
        clipping_share: Share of the noise that comes from values beyond the calibrated range, 0 to 1.
        e_value: Evidence for drift.
        state: calm, warning or alarm.
        onset_ts: Capture time in seconds at which the gain exceeded the tolerance; null while it does not.
        switch_to: Id of the engine of a known regime that fits the scene better; empty for none.
        closely: Whether more frames are observed than usual.
        gains_db: Noise in dB that a recalibration would save over each known regime, by the id of its engine.
        gain: Fidelity that a recalibration is expected to gain; null if it is not known.
    """

    judged: bool
    gain_db: float
    serving_db: float
    clipping_share: float
    e_value: float
    state: str
    onset_ts: float | None
    switch_to: str
    closely: bool
    gains_db: dict[str, float]
    gain: Bounds | None

    def in_telemetry(self, tolerance_db: float) -> dict[str, JsonValue]:
        """Return what telemetry has of it. tolerance_db: Gain from which an alarm is raised."""
        document = self.model_dump()
        return {**{key: document[key] for key in _IN_TELEMETRY}, "tolerance_db": tolerance_db}


class CameraStatus(Document):
    """One camera.

    Args:
        camera: Its name.
        up: Whether the camera delivers: it has delivered a frame and was not lost since; a recording, until its end.
        lost: Code of the error for which the camera is away; null while it is there, or not opened yet.
        fidelity: Of the observed frames on which something was found, since the swap or the last change of drift.
        fidelity_hour: The same over the last hour of capture time, whichever engine served.
        accuracy: Since the swap, on labelled frames.
        drift: null while nothing is calibrated.
        view: `good`, or the trouble with the view; null while the camera delivers nothing.
    """

    camera: str
    up: bool
    lost: str | None
    fidelity: Bounds
    fidelity_hour: FidelityReport
    accuracy: Accuracy
    drift: DriftStatus | None
    view: str | None


class JobStatus(Document):
    """The running job.

    Args:
        id: Its id.
        trigger: As in the event `job`.
        state: Step of the job, as in the event `job`.
        percent: Progress of the whole job.
        waits: Why it stands still for want of headroom; absent while it goes on.
    """

    id: str
    trigger: str
    state: str
    percent: int
    waits: str | None = None


class PreviewStatus(Document):
    """The preview.

    Args:
        address: Where viewers find it; null while it is not open.
        viewers: Number of viewers.
        error: Code of the error that stops it; null while it works.
    """

    address: str | None
    viewers: int
    error: str | None


class BoardStatus(CameraStatus):
    """The state of the board. It has the fields of the least faithful camera, too.

    Fields without a value are null. Only `cameras`, and `waits` of the job, are left out.

    Args:
        engine: Id of the artefact in service.
        backend: Name of the inference runtime.
        degraded: Whether the float reference serves.
        degraded_reason: Why it does, in a sentence with the remedy.
        held_back: Why a job that is due does not start or go on, in a sentence with the remedy.
        held_back_code: The reason for programs: a configuration key, or an error code.
        raised: Whether more layers are float than planned.
        frames: Frames served since the daemon began.
        cameras: The same fields of each camera, by name; absent with one camera.
        regimes: Number of known regimes.
        regime_artefacts: Ids of their engines, which `switch` takes.
        policy: Policy of the engine that serves, on probation too; of masks their number.
        policies: Policy of each engine that has one, by the engine's id.
        observer: `observing`, `preparing`, or the code of the error for which nothing is observed.
        automatic: Whether jobs start by themselves.
        stopped_by: Why they do not: a configuration key, or an error code; empty where they do.
        job: null while none runs.
        preview: null where none is configured.
    """

    engine: str
    backend: str
    degraded: bool
    degraded_reason: str | None
    held_back: str | None
    held_back_code: str | None
    raised: bool
    frames: int
    cameras: dict[str, CameraStatus] = Field(default_factory=dict)
    regimes: int
    regime_artefacts: list[str]
    policy: dict[str, JsonValue] | None
    policies: dict[str, JsonValue]
    observer: str
    automatic: bool
    stopped_by: str
    job: JobStatus | None
    preview: PreviewStatus | None

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()

    def as_result(self) -> dict[str, JsonValue]:
        """Return the result of the command. Fields that were not given are left out."""
        return self.model_dump(exclude_unset=True)
