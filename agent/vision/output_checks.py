"""Check that an engine's outputs are sound: names, types and shapes, finite values, batch rows that do not mix.

The checks return the faults in words; the caller decides what becomes of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agent.common.errors import ConfigError
from agent.vision.spec import ModelSpec
from engines.interface import Array, Engine

_ROWS = "xxyx"  # rows of a batch of two frames: equal ones beside each other, and with another one between them


def output_faults(
    outputs: Mapping[str, Array], expected: Mapping[str, Array], declared: Mapping[str, Sequence[int | None]]
) -> list[str]:
    """Return the faults of an engine's outputs, in words, compared with the reference's outputs of the same frame.

    Values may be infinite, or NaN, where the reference's are. Types may be of another width: a float16 is a float.

    Args:
        declared: shapes of outputs whose open dimensions, None, may differ from frame to frame; all others have to be
            as in `expected`.
    """
    if outputs.keys() != expected.keys():
        return [f"its outputs are {', '.join(sorted(outputs))}, not {', '.join(sorted(expected))}"]
    faults = []
    for name, reference in expected.items():
        output = outputs[name]
        if output.dtype.kind != reference.dtype.kind or not _fits(output.shape, declared.get(name, reference.shape)):
            shown = f"{reference.dtype} {list(reference.shape)}"
            faults.append(f"its output '{name}' is {output.dtype} {list(output.shape)}, not {shown}")
            continue
        broken = ~np.isfinite(output)
        if output.shape == reference.shape:
            broken &= np.isfinite(reference)
        if broken.any():
            faults.append(f"its output '{name}' is not finite")
    return faults


def _fits(shape: tuple[int, ...], declared: Sequence[int | None]) -> bool:
    return len(shape) == len(declared) and all(
        expected in (None, size) for size, expected in zip(shape, declared, strict=True)
    )


def largest_batch(engine: Engine, spec: ModelSpec) -> int:
    """Return how many frames at once the spec's first profile lets the engine take; 1 without a profile."""
    image = engine.inputs[0]
    profile = spec.profiles[0] if spec.profiles else {}
    return profile[image.name].max[0] if image.name in profile and image.shape[0] is None else 1


def check_batch(frames: int, engine: Engine, spec: ModelSpec) -> None:
    """Check that so many frames can be inferred at once.

    Raises ConfigError (`batch.frames`) otherwise.
    """
    if frames == 1:
        return
    most = largest_batch(engine, spec)
    if frames > most:
        found = f"batch.frames: {frames}, and a model that takes {most} at once"
        remedy = "export the model with an open batch and a profile whose max has that many, or set batch.frames to 1"
        raise ConfigError("batch.frames", found, f"at most {most}", remedy)
    if spec.input.follows_frames:
        found = f"batch.frames: {frames}, and input.resize '{spec.input.resize}'"
        remedy = "set input.resize to letterbox, or batch.frames to 1"
        raise ConfigError("batch.frames", found, "frames that become inputs of one size", remedy)


def row_faults(infer: Callable[[Array], Mapping[str, Array]], frames: Sequence[Array], most: int) -> list[str]:
    """Return the faults of batches of up to `most` frames, in words; none where frames for a check are missing.

    Equal frames of one batch have to get bit by bit equal answers, wherever they lie in it, and each row has to be the
    answer to its own frame.

    Args:
        frames: (1, C, H, W); the first is used, and another one of its size.
    """
    others = (frame for frame in frames[1:] if frame.shape == frames[0].shape and not np.array_equal(frame, frames[0]))
    other = next(others, None)
    if most < 2 or other is None:
        return []
    images = {"x": frames[0], "y": other}
    alone = {letter: infer(image) for letter, image in images.items()}
    faults: dict[str, None] = {}
    for pattern in ("xx", "xy") if most == 2 else (_ROWS[:most],):
        outputs = infer(np.concatenate([images[letter] for letter in pattern]))
        for name in alone["x"]:
            single = {letter: answer[name] for letter, answer in alone.items()}
            if all(len(answer.shape) and len(answer) == 1 for answer in single.values()):  # else it has no batch axis
                faults.update(dict.fromkeys(_faults_of(name, outputs[name], pattern, single)))
    return list(faults)


def _faults_of(name: str, output: Array, pattern: str, single: Mapping[str, Array]) -> list[str]:
    """Return the faults of one output for a batch by `pattern`. single: its answers (1, ...) to each frame alone."""
    if output.shape[:1] != (len(pattern),):
        return [f"its output '{name}' is {list(output.shape)} for a batch of {len(pattern)}"]
    faults = []
    if len({output[row].tobytes() for row, letter in enumerate(pattern) if letter == "x"}) > 1:
        faults.append(f"its output '{name}' differs between equal rows of a batch")
    if any(_is_swapped(output[row], letter, single) for row, letter in enumerate(pattern)):
        faults.append(f"its output '{name}' gives a row of a batch the answer to another one")
    return faults


def _is_swapped(row: Array, letter: str, single: Mapping[str, Array]) -> bool:
    """Return whether a row is far nearer to the other frame's answer; another batch size may change last bits."""
    own, other = single[letter][0], single["y" if letter == "x" else "x"][0]
    if not row.shape == own.shape == other.shape:
        return False
    with np.errstate(all="ignore"):
        to_own, to_other = (float(np.abs(row.astype(np.float64) - each).max(initial=0.0)) for each in (own, other))
    return to_other < 0.5 * to_own
