"""Validate MODEL.yaml, the spec of one model: its task, its input, its decoder and its thresholds.

`ModelSpec` is the whole file. `InputSpec` says how frames become network inputs, `ProfileShapes` of which shapes those
may be, `PrecisionRules` what the user decides about precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
)

from agent.common.errors import ConfigError
from agent.common.schema import Finite, Strict, read_yaml, validate
from agent.vision.registry import TASKS, task_class
from engines.store.files import read_text

DECODER_GROUP = "tared.decoders"  # the entry point group in which installed packages name theirs
_DECODER_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

_LARGEST = 2.0**64
_FOLLOWING = ("native", "nearest", "rect")


def _rank_four(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 4:
        raise ValueError("four dimensions: batch, channels, height, width, or channels last")
    return shape


def _known_task(name: str) -> str:
    task_class(name)
    return name


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Shape = Annotated[tuple[PositiveInt, ...], AfterValidator(_rank_four)]
Suppression = Literal["per-class", "agnostic", "none"]
Resize = Literal["letterbox", "stretch", "pad", "native", "nearest", "rect"]
Anchor = Literal["top-left", "center"]
_TASKS = {"anyOf": [{"enum": [*TASKS]}, {"type": "string"}]}  # those of installed packages, too
_WITHOUT_OVERLAPS = ("end2end", "detr", "rtdetr", "dbnet", "torchvision")  # decoders of what finds each object once
_LATER = ("nms", "depth", "max_ratio", "keypoints", "sigmas", "inputs", "params")
_NUMBERS = {"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "array"}]}}
_LABELS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}  # a file's name, or a list


class InputSpec(Strict):
    """How a BGR frame becomes the network input: (x * scale - mean) / std, channels in the order of `color`.

    The values of `resize`:
    - `letterbox` scales a frame into the input, with its proportions, and pads.
    - `stretch` scales it to the input.
    - `pad` keeps its pixels as they are, pads it to the input, and cuts off what lies beyond.

    With the others, the input of a model of open size follows the frame, in `multiple`s within the profile:
    - `native` is `pad` to the frame's own size, rounded up.
    - `nearest` is `stretch` to the allowed size next to the frame's, with the frame's proportions where that is beyond
      the profile.
    - `rect` is `letterbox` into the opt shape, without the padding that `multiple` does not require.
    """

    color: Literal["bgr", "rgb", "gray"] = "bgr"
    resize: Resize = "letterbox"
    anchor: Anchor = "top-left"
    pad: Annotated[int, Field(ge=0, le=255)] = 114
    multiple: PositiveInt = 1
    mean: tuple[Finite, ...] = (0.0,)
    std: tuple[Finite, ...] = (1.0,)
    scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0

    @property
    def channels(self) -> int:
        return 1 if self.color == "gray" else 3

    @property
    def has_padding(self) -> bool:
        """True where the network input may have margins that no frame covers."""
        return self.resize not in ("stretch", "nearest")

    @property
    def follows_frames(self) -> bool:
        """True where frames of several sizes become network inputs of several sizes."""
        return self.resize in _FOLLOWING

    @field_validator("multiple")
    @classmethod
    def _only_of_open_sizes(cls, multiple: int, info: ValidationInfo) -> int:
        if multiple != 1 and info.data.get("resize", "native") not in _FOLLOWING:
            raise ValueError("1 unless resize is native, nearest or rect: every other input has the model's one size")
        return multiple

    @field_validator("mean", "std")
    @classmethod
    def _one_value_or_one_per_channel(cls, values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        color = info.data.get("color", "bgr")
        channels = 1 if color == "gray" else 3
        if len(values) not in (1, channels):
            raise ValueError("one value for color 'gray'" if channels == 1 else "one value, or one per channel")
        return values

    @field_validator("std")
    @classmethod
    def _nonzero(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if 0.0 in values:
            raise ValueError("values other than zero")
        return values


class ProfileShapes(Strict):
    """The shapes of one input in an optimization profile, each (batch, channels, height, width), or channels last.

    Args:
        min: The smallest shape that the engine accepts.
        opt: The shape that the engine is tuned for.
        max: The largest shape that the engine accepts.
    """

    min: Shape
    opt: Shape
    max: Shape

    @field_validator("opt", "max")
    @classmethod
    def _not_below(cls, shape: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        for lower in ("min", "opt"):
            bound = info.data.get(lower, shape)
            if any(low > high for low, high in zip(bound, shape, strict=True)):
                raise ValueError(f"no dimension below '{lower}' {list(bound)}")
        return shape


class PrecisionRules(Strict):
    """What the user decides about precision, whatever is measured: names of nodes, globs, operator types.

    Args:
        keep_float: stay float.
        force_int8: are INT8 wherever they can be, whatever is lost.
    """

    keep_float: tuple[str, ...] = ()
    force_int8: tuple[str, ...] = ()


class ModelSpec(Strict):
    """One model: its ONNX file, its task, its input and how its outputs are decoded.

    Args:
        inputs: the constant that each input beside the image gets, a number or nested lists of numbers.
        score_threshold: a fraction, as is iou_threshold.
        nms: which overlapping candidates are suppressed; None leaves it to the decoder, see `suppression`.
        depth: whether values are distances (metric), or known but for a scale and a shift: as a distance (relative) or
            as its inverse (disparity), for task `depth`.
        keypoints: how many key points an object has, or their names, for task `pose`.
        sigmas: how far people's labels of each key point scatter, by the root of an object's area (COCO), for task
            `pose`; None: COCO's for 17 key points, else 0.05.
        max_ratio: up to which two values agree, for task `depth`; None: 1.05. Where they are not metric, their
            difference counts, as a share of their spread: 0.05.
        min_sqnr_db: the least that the channels of an engine's outputs have to reach, for task `raw`; by name, of the
            outputs that are judged.
        params: keys of a task of an installed package, which the task's `check_params` checks.
        reference_accuracy: the accuracy of the float model as the user knows it, for task `classify`.
    """

    path: Path
    task: Annotated[str, AfterValidator(_known_task), WithJsonSchema(_TASKS)]
    decoder: str | None = Field(default=None, validate_default=True)
    input: InputSpec = InputSpec()
    inputs: Annotated[dict[str, Any] | None, WithJsonSchema(_NUMBERS)] = None
    profiles: tuple[dict[str, ProfileShapes], ...] = Field(default=(), validate_default=True)
    labels: Annotated[tuple[str, ...], WithJsonSchema(_LABELS)] = ()
    score_threshold: Fraction = 0.3
    iou_threshold: Fraction = 0.5
    nms: Suppression | None = None
    min_sqnr_db: Finite | dict[str, Finite] = 20.0
    precision: PrecisionRules = PrecisionRules()
    depth: Literal["metric", "relative", "disparity"] | None = None
    max_ratio: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    keypoints: Annotated[PositiveInt | tuple[str, ...] | None, Field(validate_default=True)] = None
    sigmas: tuple[Annotated[float, Field(gt=0.0, allow_inf_nan=False)], ...] | None = None
    params: dict[str, Any] | None = None
    # Not dumped: no engine depends on it, and engines and plans are identified by the dump of their spec.
    reference_accuracy: Fraction | None = Field(default=None, exclude=True)

    @field_validator("decoder")
    @classmethod
    def _decoder_fits_task(cls, decoder: str | None, info: ValidationInfo) -> str | None:
        task = info.data.get("task")
        if task is None:  # it is wrong itself
            return decoder
        known = task_class(task).decoders
        if decoder is None:
            if known:
                raise ValueError(f"{_decoder_names(known)} for task '{task}'")
        elif not known:
            raise ValueError(f"no decoder for task '{task}'")
        elif not (decoder in known or _DECODER_FUNCTION.fullmatch(decoder) or decoder in installed_decoders()):
            raise ValueError(_decoder_names(known))
        return decoder

    @field_validator("nms", "depth", "max_ratio", "keypoints", "sigmas", "reference_accuracy")
    @classmethod
    def _only_of_its_task(cls, value: Any, info: ValidationInfo) -> Any:
        key, task = info.field_name or "", info.data.get("task")
        if task is None:  # it is wrong itself
            return value
        found = task_class(task)
        if not value and key in found.needed_keys:
            raise ValueError(found.needed_keys[key])
        if value is not None and key not in found.keys:
            why = ": fidelity bounds no other accuracy" if key == "reference_accuracy" else ""
            others = [name for name in TASKS if key in task_class(name).keys]
            raise ValueError(f"null unless task is {' or '.join(map(repr, others))}{why}")
        return value

    @field_validator("params")
    @classmethod
    def _params_fit_task(cls, params: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if (task := info.data.get("task")) is None or params is None:
            return params
        try:
            task_class(task).check_params(params)
        except ValueError:
            raise
        except Exception as error:  # it is the package's
            raise ValueError(f"what task '{task}' can check; it raises {type(error).__name__}: {error}") from error
        return params

    @field_validator("sigmas")
    @classmethod
    def _one_for_each_keypoint(cls, value: Any, info: ValidationInfo) -> Any:
        points = info.data.get("keypoints")
        if value is not None and points and len(value) != (points if isinstance(points, int) else len(points)):
            raise ValueError("one value for each of keypoints")
        return value

    @field_validator("inputs")
    @classmethod
    def _numbers(cls, inputs: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, value in (inputs or {}).items():
            if not _is_numbers(value):
                raise ValueError(f"a number, or lists of numbers, for input '{name}'")
        return inputs

    @field_validator("profiles")
    @classmethod
    def _bounds_of_open_sizes(
        cls, profiles: tuple[dict[str, ProfileShapes], ...], info: ValidationInfo
    ) -> tuple[dict[str, ProfileShapes], ...]:
        if not profiles and "input" in info.data and info.data["input"].follows_frames:
            raise ValueError(f"the least and the largest input, for input.resize '{info.data['input'].resize}'")
        return profiles

    @field_validator("labels", mode="before")
    @classmethod
    def _labels_from_file(cls, labels: object) -> object:
        return _read_labels(Path(labels)) if isinstance(labels, str) else labels

    @model_serializer(mode="wrap")
    def _without_unsaid(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave later keys that are not set out of the dump: engines built before they existed keep their ids."""
        content: dict[str, Any] = dump(self)
        return {key: value for key, value in content.items() if key not in _LATER or value is not None}

    @property
    def suppression(self) -> Suppression:
        """Which overlapping candidates are suppressed. By default none are where the model finds each object once."""
        return self.nms or ("none" if self.decoder in _WITHOUT_OVERLAPS else "per-class")

    @property
    def keypoint_count(self) -> int:
        """How many key points an object has; 0 for a task without them."""
        return self.keypoints if isinstance(self.keypoints, int) else len(self.keypoints or ())

    def label(self, class_id: int) -> str:
        """Return the name of a class; its number where the spec has no name for it."""
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else str(class_id)


def _is_numbers(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and abs(value) < _LARGEST  # which NaN is not


def rebase(content: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return a model spec's plain data with its files, `path` and a `labels` file, taken relative to `base`.

    This is done before validation, so that a missing labels file is reported together with every other error.

    Args:
        base: Its folder.
    """
    files = {key: str(base / content[key]) for key in ("path", "labels") if isinstance(content.get(key), str)}
    return {**content, **files}


def load_model_spec(path: Path) -> ModelSpec:
    """Read MODEL.yaml.

    Args:
        path: The file; its paths are relative to it.

    Raises ConfigError (`config.missing`, `config.unreadable`, `config.invalid`) with every error at once.
    """
    if path.suffix.lower() == ".onnx":
        remedy = f"'tared inspect {path} -o MODEL.yaml' writes one"
        raise ConfigError("config.unreadable", f"the model {path} itself", "a MODEL.yaml that describes it", remedy)
    return validate(ModelSpec, rebase(read_yaml(path), path.parent), str(path))


def installed_decoders() -> list[str]:
    """Return the names that installed packages give their decoders, each once."""
    return sorted(entry_points(group=DECODER_GROUP).names)


def _decoder_names(known: Sequence[str]) -> str:
    installed = [name for name in installed_decoders() if name not in known]
    return f"{', '.join([*known, *installed])}, 'package.module:function', or a name that an installed package gives"


def _read_labels(path: Path) -> Sequence[str]:
    """Return the names in a text file, one per line; empty lines at the end do not count."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError):
        raise ValueError("a list, or a readable text file with one label per line") from None
    labels = [line.strip() for line in text.rstrip().splitlines()]
    if not labels:
        raise ValueError("a text file with at least one label")
    return labels
