"""Read config.yaml into one frozen schema.

The comments of the reference config.yaml describe each key; the docstrings here only name the sections. `camera`,
`mqtt` and `model` are in agent/camera/config.py, agent/mqtt/config.py and agent/vision/spec.py. `Config` comes first
in meaning and last in the file, since its defaults need the sections.

>>> config = load_config(Path("examples/street/config.yaml"))
>>> config.calibration.method
'entropy'
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from agent.camera.config import CameraConfig
from agent.common.credentials import FileOrCredential
from agent.common.errors import CameraError, ConfigError
from agent.common.http.addresses import is_loopback, split_address
from agent.common.schema import (
    OPTIONAL_TEXT,
    Finite,
    LocalPath,
    Strict,
    in_folder,
    invalid,
    read_yaml,
    validate,
    verbatim_error,
)
from agent.mqtt.config import MqttConfig
from agent.vision.registry import accepted_loss
from agent.vision.spec import ModelSpec, load_model_spec, rebase
from calibrate.errors import CalibrationError
from calibrate.threshold import parse_method
from engines.interface import BackendOptions
from engines.registry import options_for

log = logging.getLogger(__package__)

# The keys that people set, in the order in which they do: all of what `tared init` writes, and the first page of the
# reference. The others have defaults that fit nearly every board.
FIRST_KEYS = (
    "model",
    "camera.source",
    "camera.name",
    "camera.decoder",
    "camera.width",
    "camera.height",
    "camera.region",
    "camera.masks",
    "cameras",
    "backend",
    "state_dir",
    "mqtt.host",
    "mqtt.port",
    "mqtt.username",
    "mqtt.password_file",
    "mqtt.tls",
    "mqtt.fleet",
    "mqtt.device",
    "mqtt.home_assistant.enabled",
    "results.file",
    "results.socket",
    "results.mqtt_per_s",
    "preview.address",
    "privacy.preview",
    "privacy.snapshot",
    "metrics.port",
    "commands.operator_keys",
    "recalibration.max_loss",
    "recalibration.automatic",
    "plan",
)

# Keys of 0.2.0 that have no effect any more, and the value that counts instead.
REMOVED_KEYS: Mapping[str, str] = {
    "recalibration.headroom.temperature_limit_c": "the kernel's limit of each zone counts, or 85 C on a Jetson",
    "regimes.fidelity": "0.8 counts, or 1 - recalibration.max_loss where that is less",
}


class CommandsConfig(Strict):
    """The keys whose commands and releases count.

    product: the product that a release has to name. unsigned: None refuses unsigned commands if there are keys, or if
    the broker is on another machine.
    """

    operator_keys: tuple[FileOrCredential, ...] = ()
    release_keys: tuple[FileOrCredential, ...] = ()
    product: str | None = Field(default=None, min_length=1, max_length=256)
    unsigned: Literal["refuse", "allow"] | None = None
    clock: Literal["synchronised", "trusted"] = "synchronised"


class PrivacyConfig(Strict):
    """The permission for pictures, histograms of a calibration and the preview to leave the board."""

    snapshot: bool = False
    preview: bool = False
    histograms: bool = False


class ResultsConfig(Strict):
    """The outputs for the result of each frame."""

    file: LocalPath | None = None
    socket: LocalPath | None = None
    mqtt_per_s: Finite = Field(default=0.0, ge=0.0, le=60.0)


def _preview_address(address: str, info: ValidationInfo) -> str:
    """Return an absolute path, taken from the file's folder, or a loopback address as it is."""
    if "/" in address:
        return str(in_folder(Path(address), info).absolute())
    place = split_address(address)
    if place is None:
        raise ValueError("a loopback address such as 127.0.0.1:8090, or a socket's path such as ./preview.sock")
    if not place[0] or not is_loopback(place[0]):
        raise ValueError(
            "a loopback address: the preview has no password. Elsewhere use ssh -L (docs/concepts/privacy.md)"
        )
    return address


class PreviewConfig(Strict):
    """Annotated frames for people, as MJPEG: where, and how often, how wide and for how many viewers at most."""

    address: Annotated[str, AfterValidator(_preview_address)] | None = None
    per_s: Finite = Field(default=5.0, gt=0.0, le=30.0)
    width: int = Field(default=960, ge=64, le=7680)
    viewers: int = Field(default=4, ge=1, le=32)

    @property
    def place(self) -> Path | tuple[str, int] | None:
        """The address as the path of a Unix socket, or as host and port."""
        if self.address is None or "/" in self.address:
            return Path(self.address) if self.address is not None else None
        place = split_address(self.address)
        assert place is not None  # it was checked
        host, port = place
        return ("127.0.0.1" if host == "localhost" else host), port


def _known_method(method: str) -> str:
    try:
        parse_method(method)
    except CalibrationError as error:
        raise ValueError(error.expected) from None
    return method


Method = Annotated[str, AfterValidator(_known_method)]


def _time_of_day(value: object) -> object:
    if type(value) is int and 0 <= value < 24 * 60:  # YAML 1.1 reads 23:30 without quotes as 23 * 60 + 30
        return f"{value // 60:02}:{value % 60:02}"
    if isinstance(value, str) and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value, re.ASCII):
        raise ValueError("a time of day like '03:00'")
    return value


TimeOfDay = Annotated[str, BeforeValidator(_time_of_day)]


class ObserveConfig(Strict):
    """The rate at which the reference engine observes frames.

    period_s, alert_period_s: seconds of capture time. budget: share of the inference time. audit_period_s: seconds
    between two frames on which the reference is compared with ONNX Runtime; None: it never is. reference: the runtime
    that the reference runs on.
    """

    budget: Annotated[float, Field(gt=0.0, le=1.0)] | None = 0.02
    period_s: Finite = Field(default=1.0, gt=0.0)
    alert_period_s: Finite = Field(default=0.2, gt=0.0)
    held_out: int = Field(default=32, ge=8, le=512)
    audit_period_s: Annotated[Finite, Field(ge=1.0)] | None = 300.0
    reference: Literal["own", "onnxruntime"] = "own"


class LabellingConfig(Strict):
    """The random choice of observed frames for people to label, so that accuracy is known.

    per_week: how many are drawn in the mean; 0: none. most_waiting: while so many wait for their label, none is drawn.
    keep: pictures of labelled frames, of which the oldest are removed.
    """

    per_week: Finite = Field(default=50.0, ge=0.0, le=1e6)
    most_waiting: int = Field(default=200, ge=1, le=100_000)
    keep: int = Field(default=1000, ge=0, le=1_000_000)


class CalibrationConfig(Strict):
    """The frames and the method of a calibration. file: what the first one begins with in place of frames."""

    frames: int = Field(default=512, ge=1)
    within_s: Finite = Field(default=300.0, gt=0.0)
    contact_sheet: bool = True
    method: Method = "entropy"
    file: LocalPath | None = None


class DriftConfig(Strict):
    """The limits at which drift raises an alarm."""

    tolerance_db: float = Field(default=3.0, gt=0.0, lt=12.0)
    min_gain: float = Field(default=0.01, ge=0.0, le=1.0)
    block_s: Finite = Field(default=3.0, gt=0.0, le=86400.0)
    false_alarms_per_30d: Finite = Field(default=1.0, gt=0.0, le=1000.0)


class RegimesConfig(Strict):
    """Calibrations that have proved themselves, and are switched to when their scene returns."""

    most: int = Field(default=5, ge=1, le=32)
    dwell_s: Finite = Field(default=600.0, gt=0.0)
    switch_db: float = Field(default=1.5, gt=0.0, lt=12.0)
    cooldown_s: Finite = Field(default=120.0, ge=0.0)


class HeadroomConfig(Strict):
    """The resources that a job needs. None: not checked; for the times: no limit."""

    memory_bytes: int | None = Field(default=2**29, ge=0)
    temperature_margin_c: Annotated[Finite, Field(ge=0.0, le=100.0)] | None = 10.0
    temperature_limit_c: ClassVar[float] = 85.0  # a Jetson's zone without a limit of the kernel has this one
    power_share: Annotated[Finite, Field(gt=0.0, le=10.0)] | None = 0.9
    throttling: bool = True
    max_delay_s: Annotated[Finite, Field(ge=0.0)] | None = 1800.0
    max_pause_s: Annotated[Finite, Field(ge=0.0)] | None = 900.0


class RecalibrationConfig(Strict):
    """The answer to an alarm, and the limits of jobs."""

    automatic: bool = True
    raise_precision: bool = True
    max_loss: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    max_slowdown: Finite = Field(default=1.25, ge=1.0, le=100.0)
    nice: int = Field(default=19, ge=0, le=19)
    timeout_s: Finite = Field(default=900.0, gt=0.0)
    cooldown_s: Finite = Field(default=600.0, ge=0.0)
    per_day: int = Field(default=8, ge=1, le=1000)
    schedule: tuple[TimeOfDay, ...] = ()
    memory_bytes: Annotated[int, Field(ge=2**26)] | None = None
    headroom: HeadroomConfig = HeadroomConfig()


class BatchConfig(Strict):
    """The number of frames of several cameras that are inferred at once."""

    frames: int = Field(default=1, ge=1, le=32)
    wait_s: Finite = Field(default=0.0, ge=0.0, le=1.0)

    @field_validator("wait_s")
    @classmethod
    def _check_wait(cls, wait_s: float, info: ValidationInfo) -> float:
        if wait_s > 0.0 and info.data.get("frames") == 1:
            raise ValueError("0 where batch.frames is 1: a frame by itself waits for no other")
        return wait_s


class PlanningConfig(Strict):
    """The measured search of a job for layers that have to stay float.

    budget_s: seconds of the child's CPU time per thread; the noise that is not measured by then is predicted.
    """

    budget_s: Finite = Field(default=120.0, ge=0.0, le=86400.0)


class ProbationConfig(Strict):
    """The trial of a candidate engine on live frames before it becomes current."""

    frames: int = Field(default=300, ge=1, le=1_000_000)
    seconds: Finite = Field(default=60.0, ge=0.0, le=86400.0)
    max_slowdown: Finite = Field(default=2.0, ge=1.0, le=100.0)
    deadline_s: Finite = Field(default=2.0, gt=0.0, le=5.0)
    rollbacks_per_day: int = Field(default=3, ge=1, le=1000)


class StoreConfig(Strict):
    """The number of old engines that are kept, and the disk space that stays free."""

    keep: int = Field(default=3, ge=0, le=1000)
    reserve_bytes: int = Field(default=500_000_000, ge=0)


class MetricsConfig(Strict):
    """The address at which Prometheus reads metrics. names: further names by which it may ask, in the Host header."""

    port: int | None = Field(default=None, ge=1, le=65535)
    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()


def _state_dir(path: Any) -> Any:
    return (os.environ.get("STATE_DIRECTORY") or "var") if path is None else path


StateDir = Annotated[LocalPath, BeforeValidator(_state_dir), WithJsonSchema(OPTIONAL_TEXT)]


class Config(Strict):
    """The whole of config.yaml."""

    model: ModelSpec
    cameras: tuple[CameraConfig, ...] = ()
    camera: CameraConfig | None = Field(default=None, validate_default=True)
    plan: LocalPath | None = None
    start: LocalPath | None = None
    backend: str = "auto"
    threads: int = Field(default=1, ge=1, le=64)
    batch: BatchConfig = BatchConfig()
    dla: int | None = Field(default=None, ge=0)
    state_dir: StateDir = Field(default_factory=lambda: Path(_state_dir(None)), validate_default=True)
    observe: ObserveConfig = ObserveConfig()
    labelling: LabellingConfig = LabellingConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    drift: DriftConfig = DriftConfig()
    regimes: RegimesConfig = RegimesConfig()
    recalibration: RecalibrationConfig = Field(default=RecalibrationConfig(), validate_default=True)
    planning: PlanningConfig = PlanningConfig()
    probation: ProbationConfig = ProbationConfig()
    store: StoreConfig = StoreConfig()
    mqtt: MqttConfig = Field(default_factory=MqttConfig)
    results: ResultsConfig = ResultsConfig()
    preview: PreviewConfig = PreviewConfig()
    metrics: MetricsConfig = MetricsConfig()
    commands: CommandsConfig = CommandsConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["logfmt", "json"] = "logfmt"

    @field_validator("recalibration")
    @classmethod
    def _check_timeout(cls, recalibration: RecalibrationConfig, info: ValidationInfo) -> RecalibrationConfig:
        calibration = info.data.get("calibration")  # absent if it is invalid itself
        if calibration is not None and recalibration.timeout_s <= calibration.within_s:
            raise ValueError(f"timeout_s above calibration.within_s, which is {calibration.within_s:g}")
        return recalibration

    @field_validator("cameras")
    @classmethod
    def _check_names(cls, cameras: tuple[CameraConfig, ...]) -> tuple[CameraConfig, ...]:
        names = [camera.name for camera in cameras]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise verbatim_error(f"expected a name of its own for each, got {twice[0]!r} more than once")
        return cameras

    @field_validator("camera")
    @classmethod
    def _check_camera(cls, camera: CameraConfig | None, info: ValidationInfo) -> CameraConfig | None:
        if "cameras" in info.data and bool(info.data["cameras"]) == (camera is not None):
            raise verbatim_error("expected camera or cameras, got both" if camera is not None else "missing")
        return camera

    @property
    def max_loss(self) -> float:
        """The largest accepted loss of fidelity: `recalibration.max_loss`, or that of the model's task."""
        return accepted_loss(self.model.task, self.recalibration.max_loss)

    @property
    def every_camera(self) -> tuple[CameraConfig, ...]:
        """All cameras: one or more, each with a name of its own."""
        return self.cameras if self.camera is None else (self.camera,)

    def backend_options(self, threads: int | None = None) -> BackendOptions:
        """Return the options of the serving runtime; threads: None for the configured number."""
        return options_for(self.state_dir, threads or self.threads, self.dla, self.observe.reference)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of config.yaml without REMOVED_KEYS; those found are logged.

    Raises ConfigError as `read_yaml`.
    """
    content = dict(read_yaml(path))
    for key, instead in REMOVED_KEYS.items():
        if _remove(content, key.split(".")):
            log.warning("config=%s ignored_key=%s instead=%r", path, key, instead)
    return content


def _remove(content: dict[str, Any], names: list[str]) -> bool:
    """Take out a key, without a change to the sections that others may hold; return whether it was there."""
    name, *inner = names
    if not inner:
        return content.pop(name, content) is not content
    section = content.get(name)
    if not isinstance(section, Mapping):
        return False
    content[name] = dict(section)
    return _remove(content[name], inner)


def check_config(path: Path) -> Config:
    """Read config.yaml as `load_config`, and report together with its errors what the start of a daemon would find.

    That is a model spec or model that is not there, and keys that do not fit a camera's kind of source.
    Raises ConfigError that lists every error at once.
    """
    content = _read(path)
    base = path.resolve().parent
    errors: list[str] = []
    if isinstance(content.get("model"), str):
        try:
            content["model"] = load_model_spec(base / content["model"]).model_dump()
        except ConfigError as error:
            errors += [f"model: {line}" for line in error.lines]
            content["model"] = {"path": path, "task": "raw"}
    elif isinstance(content.get("model"), Mapping):
        content["model"] = rebase(content["model"], base)
    config = None
    try:
        config = validate(Config, content, str(path), base)
    except ConfigError as error:
        errors += error.lines
    cameras = content.get("cameras")
    for section in cameras if isinstance(cameras, list) else [content.get("camera")]:
        with suppress(ConfigError):  # which is among the errors already
            errors += _misfits(validate(CameraConfig, section or {}, str(path), base))
    if config is not None and not errors and not config.model.path.is_file():
        errors.append(f"model.path: expected a file, got {str(config.model.path)!r}")
    if config is None or errors:
        raise invalid(errors, str(path))
    return config


def _misfits(camera: CameraConfig) -> list[str]:
    try:
        camera.to_source()
    except CameraError as error:
        return [f"camera {camera.name!r}: expected {error.expected}, got {error.found}"]
    return []


def load_config(path: Path) -> Config:
    """Read config.yaml; relative paths in it are relative to its folder.

    `model` is a model spec or the path of a MODEL.yaml. Raises ConfigError that lists every error at once.
    """
    content = _read(path)
    base = path.resolve().parent
    model = content.get("model")
    if isinstance(model, str):
        spec_path = base / model
        content["model"] = rebase(read_yaml(spec_path), spec_path.parent)
    elif isinstance(model, Mapping):
        content["model"] = rebase(model, base)
    return validate(Config, content, str(path), base)
