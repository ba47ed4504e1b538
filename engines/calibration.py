"""The calibration file: what a model's activations look like in one light, and the scales chosen from it.

`calibration.json` holds what a person reads (method, amax and scale per tensor, where the frames came from);
`calibration.npz` beside it holds the exact histograms, so that another method, or a merge with another board's
file, needs no frame again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, merge_all
from calibrate.scale import activation_scale
from calibrate.threshold import histogram_amax, parse_method
from engines.store import fingerprint

SCHEMA = 1


@dataclass(frozen=True)
class Calibration:
    """Histograms per tapped tensor with the amax chosen from them.

    model_sha256: canonical hash of the FP32 master graph the taps belong to.
    frames: frames observed; source: where they came from, for people.
    """

    model_sha256: str
    method: str
    frames: int
    source: str
    histograms: Mapping[str, AbsHistogram]
    amax: Mapping[str, float]

    @property
    def id(self) -> str:
        """16 hex digits over what the scales follow from."""
        return fingerprint({"model": self.model_sha256, "method": self.method, "amax": dict(self.amax)})

    @property
    def scales(self) -> dict[str, float]:
        """Scale per tensor, amax / 127."""
        return {name: float(activation_scale(amax, name)) for name, amax in self.amax.items()}


def calibrate_histograms(
    histograms: Mapping[str, AbsHistogram],
    shared: tuple[tuple[str, ...], ...],
    *,
    model_sha256: str,
    method: str,
    frames: int,
    source: str,
) -> Calibration:
    """Choose an amax per tensor; the tensors of one `shared` group get one amax, from their merged histogram.

    Raises CalibrationError: `calibration.empty` without frames, `calibration.nonfinite` when a tensor held NaN or
    infinities (named and counted), `threshold.method` for an unknown method.
    """
    parse_method(method)
    if frames == 0 or not histograms:
        raise CalibrationError(
            "calibration.empty", "no observed frame", "at least one", "check that the source delivers frames"
        )
    _refuse_nonfinite(histograms)
    amax: dict[str, float] = {}
    grouped = {name: group for group in shared for name in group}
    for name in histograms:
        if name not in amax:
            group = [member for member in grouped.get(name, (name,)) if member in histograms]
            members = [histograms[member] for member in group]
            value = histogram_amax(merge_all(members, members[0].bits), method)
            amax.update(dict.fromkeys(group, value))
    return Calibration(model_sha256, method, frames, source, dict(histograms), amax)


def _refuse_nonfinite(histograms: Mapping[str, AbsHistogram]) -> None:
    broken = {name: h.nonfinite for name, h in histograms.items() if h.nonfinite}
    if broken:
        first = next(iter(broken))
        raise CalibrationError(
            "calibration.nonfinite",
            f"{len(broken)} tensors with NaN or infinite values, first '{first}' with {broken[first]}",
            "finite activations",
            "check the model's weights and the input normalisation of the model spec",
        )


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write `path` (.json) and the histograms beside it (.npz); missing folders are made.

    Raises CalibrationError (`calibration.write`) when the disk refuses.
    """
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
        "tensors": tensors,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_histograms(calibration.histograms, path.with_suffix(".npz"))
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CalibrationError(
            "calibration.write", f"{path}: {error.strerror}", "a writable place with room", "choose another -o"
        ) from error


def load_calibration(path: Path) -> Calibration:
    """Read what `save_calibration` wrote. Raises CalibrationError (`calibration.unreadable`)."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}, this tared reads {SCHEMA}")
        amax = {str(name): float(entry["amax"]) for name, entry in document["tensors"].items()}
        histograms = load_histograms(path.with_suffix(".npz"))
        if set(histograms) != set(amax):
            raise ValueError("the .json and the .npz name different tensors")
        return Calibration(
            str(document["model_sha256"]),
            str(document["method"]),
            int(document["frames"]),
            str(document["source"]),
            histograms,
            amax,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            "calibration.unreadable",
            f"{path}: {type(error).__name__}: {error}",
            "a calibration.json with its .npz beside it",
            "make one with 'tared calibrate'",
        ) from error


def save_histograms(histograms: Mapping[str, AbsHistogram], path: Path) -> None:
    """Write histograms to one .npz; they must have equal numbers of bins."""
    entries = list(histograms.values())
    np.savez_compressed(
        path,
        names=np.array(list(histograms), np.str_),
        counts=np.stack([h.counts for h in entries]),
        range_exp=np.array([h.range_exp for h in entries], np.int32),
        amax=np.array([h.amax for h in entries], np.float64),
        zeros=np.array([h.zeros for h in entries], np.int64),
        nonfinite=np.array([h.nonfinite for h in entries], np.int64),
    )


def load_histograms(path: Path) -> dict[str, AbsHistogram]:
    """Read what `save_histograms` wrote. Raises OSError, ValueError or KeyError for anything else."""
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, Any] = {key: file[key] for key in file.files}
    columns = (arrays[key] for key in ("names", "counts", "range_exp", "amax", "zeros", "nonfinite"))
    return {
        str(name): AbsHistogram(counts, int(range_exp), float(amax), int(zeros), int(nonfinite))
        for name, counts, range_exp, amax, zeros, nonfinite in zip(*columns, strict=True)
    }
