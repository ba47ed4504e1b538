"""Write and read the calibration file: a model's activations in one light, and the scales chosen from them.

`calibration.json` holds what a person reads (method, amax and scale of each tensor, where the frames came from).
`calibration.npz` beside it holds the exact histograms, so that another method, or a merge with another board's
file, needs no frame again. It also holds the extremes of the channels that layers read, from which a plan that divides
them has its ranges. The .json carries a `seal` over both, so that a damaged file, or two that do not belong together,
are refused.

Read in this order: Calibration, `calibrate_histograms`, `save_calibration`, `load_calibration`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, checked, merge_all
from calibrate.repair import Extremes
from calibrate.scale import activation_scale
from calibrate.threshold import entropy_window, histogram_amax, parse_method
from engines.errors import DeviceError, EngineError
from engines.interface import EntropySearch
from engines.store.artefact import fingerprint
from engines.store.files import read_regular, read_text, replace_files, why_unwritable

log = logging.getLogger(__package__)

SCHEMA = 1
_MOST_BYTES = 1 << 30  # histograms of a thousand tensors take some 30 MiB
# Exceptions of np.load and zipfile for files that are none of ours, or damaged.
_FOREIGN = (
    *(ArithmeticError, AttributeError, BadZipFile, EOFError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError, zlib.error),
)


@dataclass(frozen=True)
class Calibration:
    """Hold histograms of each tapped tensor with the amax chosen from them.

    Args:
        model_sha256: Canonical hash of the FP32 master graph that the taps belong to.
        method: One of calibrate.threshold's METHODS.
        frames: Number of frames observed.
        source: Where the frames came from, for people.
        histograms: By the name of the tensor.
        amax: By the name of the tensor, in its units.
        preprocessing: How frames became network inputs, the `input` of the model spec; other preprocessing, other
            scales.
        merged: The boards that a fleet has merged it from; empty for a board's own.
        check: How its INT8 graph answered on a few of its frames, in JSON's types; empty if that was not tried.
        extremes: (2, channels) of the input that a layer reads in the master graph, by the layer's name; empty if a
            fleet has merged it.

    >>> from calibrate.histogram import abs_histogram
    >>> seen = {"conv1": abs_histogram(np.float32([0.5, -12.7]))}
    >>> found = calibrate_histograms(seen, (), model_sha256="0" * 64, method="max", frames=1, source="an example")
    >>> found.amax["conv1"] == seen["conv1"].amax, round(found.scales["conv1"], 3)
    (True, 0.1)
    """

    model_sha256: str
    method: str
    frames: int
    source: str
    histograms: Mapping[str, AbsHistogram]
    amax: Mapping[str, float]
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    merged: Mapping[str, Any] = field(default_factory=dict)
    check: Mapping[str, Any] = field(default_factory=dict)
    extremes: Mapping[str, Extremes] = field(default_factory=dict, compare=False)  # arrays have no truth value

    @property
    def id(self) -> str:
        """16 hex digits over everything that the scales follow from."""
        parts = {"model": self.model_sha256, "method": self.method, "preprocessing": dict(self.preprocessing)}
        extremes = {layer: hashlib.sha256(seen.tobytes()).hexdigest() for layer, seen in self.extremes.items()}
        return fingerprint({**parts, "amax": dict(self.amax), **({"extremes": extremes} if extremes else {})})

    @property
    def seen(self) -> dict[str, float]:
        """The largest |x| seen of each tensor, which a float type has to hold."""
        return {name: histogram.amax for name, histogram in self.histograms.items()}

    @property
    def scales(self) -> dict[str, float]:
        """The scale of each tensor, amax / 127, in its units for each step."""
        return {name: float(activation_scale(amax, name)) for name, amax in self.amax.items()}


def calibrate_histograms(
    histograms: Mapping[str, AbsHistogram],
    shared: tuple[tuple[str, ...], ...],
    *,
    model_sha256: str,
    method: str,
    frames: int,
    source: str,
    preprocessing: Mapping[str, Any] | None = None,
    device: EntropySearch | None = None,
    extremes: Mapping[str, Extremes] | None = None,
) -> Calibration:
    """Choose an amax for each tensor; the tensors of one `shared` group get one amax, from their merged histogram.

    Args:
        histograms: By the name of the tensor.
        shared: Groups of tensors that must have one scale, such as the inputs of a Concat.
        model_sha256: Canonical hash of the FP32 master graph.
        method: One of calibrate.threshold's METHODS.
        frames: Number of frames observed.
        source: Where the frames came from, for people.
        preprocessing: The `input` of the model spec; None: not known.
        device: Searches for method `entropy` in the CPU's place, with the same result; None: the CPU searches.
        extremes: (2, channels) of the input of each layer, by the layer's name; None: not observed.

    Raises CalibrationError:
        calibration.empty      there was no frame
        calibration.nothing    there is no tensor
        calibration.nonfinite  a tensor held NaN or infinities; the message names and counts them
        threshold.method       the method is unknown
    """
    parse_method(method)
    if frames == 0:
        raise CalibrationError(
            "calibration.empty", "no observed frame", "frames from the source", "check that the source delivers frames"
        )
    if not histograms:
        raise CalibrationError(
            "calibration.nothing",
            "a model with nothing to quantise",
            "convolutions or matrix products with constant weights",
            "build it with --precision fp32",
        )
    broken = {name: h.nonfinite for name, h in histograms.items() if h.nonfinite}
    if broken:
        first = next(iter(broken))
        raise CalibrationError(
            "calibration.nonfinite",
            f"NaN or infinite values in {len(broken)} of {len(histograms)} tensors, '{first}' with {broken[first]}",
            "finite activations",
            "check the model's weights and the input normalisation of the model spec",
        )
    shared_by = {name: group for group in shared for name in group}
    groups = {
        tuple(member for member in shared_by.get(name, (name,)) if member in histograms): None for name in histograms
    }
    merged = [merge_all([histograms[name] for name in group], histograms[group[0]].bits) for group in groups]
    chosen = zip(groups, _choose_amax(merged, method, device), strict=True)
    amax = {name: value for group, value in chosen for name in group}
    return Calibration(
        model_sha256,
        method,
        frames,
        source,
        dict(histograms),
        amax,
        dict(preprocessing or {}),
        extremes=dict(extremes or {}),
    )


def _choose_amax(histograms: Sequence[AbsHistogram], method: str, device: EntropySearch | None) -> list[float]:
    """Return the amax of each histogram. The device searches for method `entropy`; where it fails, the CPU does."""
    if device is not None and method == "entropy" and len({histogram.bits for histogram in histograms}) == 1:
        counts = np.stack([histogram.counts for histogram in histograms])
        windows = [entropy_window(each) if each.counts.any() else (0, 0) for each in histograms]
        try:
            kept = device.search_entropy(counts, np.array(windows, np.int32)).tolist()
        except (DeviceError, EngineError) as error:
            log.warning("entropy_search=cpu reason=%r", error.found)
        else:  # the limits of `histogram_amax`
            return [
                min(max(bins * each.bin_width, each.bin_width), each.amax)
                for bins, each in zip(kept, histograms, strict=True)
            ]
    return [histogram_amax(histogram, method) for histogram in histograms]


def check_destination(path: Path) -> None:
    """Check, before the work, that its result can be written.

    Args:
        path: Where `save_calibration` shall write.

    Raises CalibrationError (`calibration.write`) if it cannot.
    """
    if path.suffix != ".json":  # the .npz takes the place of this suffix
        raise _unwritable(path, "a name that does not end in .json")
    if reason := why_unwritable(path):
        raise _unwritable(path, reason)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration and its histograms, both whole or none.

    Args:
        path: The .json; the .npz goes beside it. Missing folders are made.

    Raises CalibrationError (`calibration.write`) when the disk refuses; what was there before still is.
    """
    check_destination(path)
    tensors = {
        name: {"amax": amax, "scale": scale}
        for (name, amax), scale in zip(calibration.amax.items(), calibration.scales.values(), strict=True)
    }
    document = {
        "schema": SCHEMA,
        "model_sha256": calibration.model_sha256,
        "method": calibration.method,
        "frames": calibration.frames,
        "source": calibration.source,
        "preprocessing": dict(calibration.preprocessing),
        "tensors": tensors,
        **({"merged": dict(calibration.merged)} if calibration.merged else {}),
        **({"check": dict(calibration.check)} if calibration.check else {}),
    }
    histograms = _packed(calibration.histograms, calibration.extremes)
    document["seal"] = _seal(document, histograms)
    contents = {path.with_suffix(".npz"): histograms, path: (json.dumps(document, indent=1) + "\n").encode()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_files(contents)
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error


def load_calibration(path: Path) -> Calibration:
    """Read the two files that `save_calibration` wrote.

    Args:
        path: The .json; the .npz lies beside it.

    Raises CalibrationError:
        calibration.unreadable  files that are missing, damaged or of another calibration
        histogram.damaged       an .npz that does not hold histograms
    """
    try:
        document = json.loads(read_text(path))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}, this tared reads {SCHEMA}")
        content = read_regular(path.with_suffix(".npz"), _MOST_BYTES)
        if document.pop("seal") != _seal(document, content):
            raise ValueError("damaged, or the .json and the .npz are not of one calibration")
        histograms, extremes = _unpacked(content)
        return Calibration(
            str(document["model_sha256"]),
            str(document["method"]),
            int(document["frames"]),
            str(document["source"]),
            histograms,
            {str(name): float(entry["amax"]) for name, entry in document["tensors"].items()},
            dict(document["preprocessing"]),
            dict(document.get("merged", {})),
            dict(document.get("check", {})),
            extremes,
        )
    except OSError as error:
        raise _unreadable(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _unreadable(f"{path}: {found}") from error


def save_histograms(histograms: Mapping[str, AbsHistogram], path: Path, extremes: Mapping[str, Extremes]) -> None:
    """Write histograms, and extremes, to one .npz.

    Args:
        histograms: One or more, by the name of the tensor, with equal numbers of bins.
        extremes: (2, channels) of the input of each layer, by the layer's name.

    Raises OSError when the disk refuses.
    """
    path.write_bytes(_packed(histograms, extremes))


def load_histograms(path: Path) -> tuple[dict[str, AbsHistogram], dict[str, Extremes]]:
    """Read the histograms and the extremes that `save_histograms` wrote.

    Raises OSError for a file that cannot be read, CalibrationError (`histogram.damaged`) for one of another kind.
    """
    return _unpacked(read_regular(path, _MOST_BYTES))


def _packed(histograms: Mapping[str, AbsHistogram], extremes: Mapping[str, Extremes]) -> bytes:
    entries = list(histograms.values())
    file = io.BytesIO()
    np.savez_compressed(
        file,
        names=np.array(list(histograms), np.str_),
        counts=np.stack([h.counts for h in entries]) if entries else np.zeros((0, 0), np.int64),
        range_exp=np.array([h.range_exp for h in entries], np.int32),
        amax=np.array([h.amax for h in entries], np.float64),
        zeros=np.array([h.zeros for h in entries], np.int64),
        nonfinite=np.array([h.nonfinite for h in entries], np.int64),
        layers=np.array(list(extremes), np.str_),
        channels=np.array([seen.shape[1] for seen in extremes.values()], np.int64),
        extremes=np.concatenate([np.empty((2, 0), np.float32), *extremes.values()], axis=1),
    )
    return file.getvalue()


def _unpacked(content: bytes) -> tuple[dict[str, AbsHistogram], dict[str, Extremes]]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        columns = (arrays[key] for key in ("names", "counts", "range_exp", "amax", "zeros", "nonfinite"))
        histograms = {
            str(name): checked(AbsHistogram(counts, int(range_exp), float(amax), int(zeros), int(nonfinite)))
            for name, counts, range_exp, amax, zeros, nonfinite in zip(*columns, strict=True)
        }
        if len(histograms) != len(arrays["names"]):
            raise ValueError("one name for several histograms")
        layers, channels, extremes = (arrays[key] for key in ("layers", "channels", "extremes"))
        if extremes.dtype != np.float32 or extremes.shape != (2, channels.sum()) or (channels < 1).any():
            raise ValueError(f"extremes {extremes.dtype} {extremes.shape} of {channels.sum()} channels")
        if (extremes[0] > extremes[1]).any():
            raise ValueError("a least value above the largest")
        ends = np.cumsum(channels)
        parts = (extremes[:, end - count : end] for end, count in zip(ends, channels, strict=True))
        return histograms, {str(layer): part for layer, part in zip(layers, parts, strict=True)}
    except _FOREIGN as error:
        raise CalibrationError(
            "histogram.damaged", f"{error}", "a .npz of histograms as tared writes it", "collect them again"
        ) from error


def _seal(document: Mapping[str, Any], histograms: bytes) -> str:
    """SHA-256 (hex) over the document without its seal, however it is laid out, and the histograms' file."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode() + histograms).hexdigest()


def _unwritable(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "calibration.write", f"{path}: {found}", "a calibration.json in a writable place with room", "choose another -o"
    )


def _unreadable(found: str) -> CalibrationError:
    return CalibrationError(
        "calibration.unreadable", found, "a calibration.json with its .npz beside it", "make one with 'tared calibrate'"
    )
