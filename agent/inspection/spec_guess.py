"""A model spec guessed from an ONNX graph, key by key, with how sure each is and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.conventions import CONVENTIONS, Convention
from agent.graph_facts import GraphFacts, Scaling
from agent.model_guess import Head, Sureness, class_names

_WIDEST = 10.0  # networks are fed values of about -3 to 3; what is far wider has not been brought into a range yet


@dataclass(frozen=True)
class Guess:
    """One key of a spec, such as 'input.color'."""

    key: str
    value: Any
    sureness: Sureness
    reason: str


def guess_spec(facts: GraphFacts, head: Head) -> tuple[Guess, ...]:
    """Every key of the spec but `path` and, where the graph names no classes, `labels`."""
    return tuple(_guesses(facts, head, CONVENTIONS[head.decoder or head.task]))


def _guesses(facts: GraphFacts, head: Head, convention: Convention) -> Iterator[Guess]:
    yield Guess("task", head.task, head.sureness, head.reason)
    if head.decoder is not None:
        yield Guess("decoder", head.decoder, head.sureness, head.reason)
    as_peer = f"as {convention.peer} has it; the graph cannot tell"
    yield _color(facts, convention, as_peer)
    for key in ("resize", "anchor", "pad"):
        if key in convention.input:
            yield Guess(f"input.{key}", convention.input[key], "guess", as_peer)
    yield from _scaling(facts, convention, as_peer)
    yield from _profiles(facts)
    names = class_names(facts)
    if names and head.task != "raw":
        yield Guess("labels", list(names), "sure" if len(names) == head.classes else "guess", "its metadata name them")
    if head.task == "detect":
        yield Guess("score_threshold", convention.score, "guess", as_peer)
        yield Guess("iou_threshold", convention.iou, "guess", as_peer)


def _color(facts: GraphFacts, convention: Convention, as_peer: str) -> Guess:
    if facts.channels == 1:
        return Guess("input.color", "gray", "sure", "one channel")
    scaling = facts.scaling
    if scaling is not None and scaling.bias.size == 3:
        with np.errstate(all="ignore"):  # a graph may multiply by zero
            red, green, blue = -scaling.bias / scaling.gain  # ImageNet's means fall from red to blue
        if red > green > blue or red < green < blue:
            color = "rgb" if red > blue else "bgr"
            return Guess("input.color", color, "likely", "the graph subtracts means that fall from red to blue")
    return Guess("input.color", convention.input["color"], "guess", as_peer)


def _scaling(facts: GraphFacts, convention: Convention, as_peer: str) -> Iterator[Guess]:
    """Scale, mean and std: what the graph does itself is not to be done twice."""
    if facts.inputs and facts.inputs[0].dtype == "uint8":
        yield Guess("input.scale", 1.0, "sure", "it takes uint8")
        return
    if facts.scaling is not None:
        takes_pixels = _takes_pixels(facts.scaling)
        what = "0 to 255" if takes_pixels else "0 to 1"
        reason = f"the graph scales values of {what} itself"
        yield Guess("input.scale", 1.0 if takes_pixels else 1 / 255, "likely", reason)
        return
    yield Guess("input.scale", convention.input.get("scale", 1.0), "guess", as_peer)
    for key in ("mean", "std"):
        if key in convention.input:
            values = convention.input[key]
            fits = facts.channels != 1 or len(values) == 1
            yield Guess(f"input.{key}", values if fits else [round(float(np.mean(values)), 4)], "guess", as_peer)


def _takes_pixels(scaling: Scaling) -> bool:
    """Whether values of 0 to 255 come out in a range that networks are fed, rather than values of 0 to 1."""
    return 255 * float(np.abs(scaling.gain).max()) <= _WIDEST or float(np.abs(scaling.bias).max()) > _WIDEST


def _profiles(facts: GraphFacts) -> Iterator[Guess]:
    if not facts.is_open or facts.size is None:
        return
    image, (height, width), channels = facts.inputs[0], facts.size, facts.channels or 3
    shape = [1, channels, height, width] if facts.layout == "NCHW" else [1, height, width, channels]
    reason = f"height or width is open: {height}x{width} is assumed"
    yield Guess("profiles", [{image.name: {"min": shape, "opt": shape, "max": shape}}], "guess", reason)
