"""List the likeliest mistakes of a model spec, each as the spec that would correct it.

These are the order of the colours, letterbox against stretch, the anchor, the range of the values, and the decoder.
Nothing in an ONNX file states the first four; the decoders are those that `tared inspect` takes the outputs for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agent.inspection.inspect import one_line_yaml
from agent.inspection.spec_guess import IMAGENET, Head
from agent.vision.spec import InputSpec, ModelSpec
from agent.vision.tasks.opening import open_task

Kind = Literal["color", "resize", "values", "decoder"]

_RESIZES: Mapping[str, Mapping[str, Any]] = {
    "resize: stretch": {"resize": "stretch"},
    "resize: letterbox, top-left": {"resize": "letterbox", "anchor": "top-left"},
    "resize: letterbox, center": {"resize": "letterbox", "anchor": "center"},
}
_UNSCALED = {"scale": 1.0, "mean": (0.0,), "std": (1.0,)}
_SAME = 0.02  # share of the range of values: 127 / 128 is 127.5 / 127.5


@dataclass(frozen=True)
class Alternative:
    """A spec that differs from the one as written.

    Args:
        name: what differs, for people; of several differences all.
        kinds: what has been changed, in order; empty for the spec itself.
    """

    name: str
    kinds: tuple[Kind, ...]
    spec: ModelSpec

    def lines(self, written: ModelSpec) -> list[str]:
        """Return the lines of YAML that take the place of those in the spec as written."""
        lines = []
        if self.spec.decoder != written.decoder:
            lines.append(f"decoder: {one_line_yaml(self.spec.decoder)}")
        if self.spec.input != written.input:
            keys = self.spec.input.model_dump(mode="json")
            defaults = InputSpec().model_dump(mode="json")
            shown = {key: keys[key] for key in keys if key in ("color", "resize") or keys[key] != defaults[key]}
            lines.append(f"input: {one_line_yaml(shown)}")
        return lines


def unchanged(spec: ModelSpec, is_guessed: bool) -> Alternative:
    """Return the spec itself, with which the others are compared. is_guessed: of an ONNX file, by its graph."""
    return Alternative("the guessed spec" if is_guessed else "the spec as written", (), spec)


def alternatives(base: Alternative, heads: Sequence[Head], is_bytes: bool) -> Iterator[Alternative]:
    """Yield what differs from `base` in one more kind, which it does not differ in from the spec as written yet.

    Args:
        heads: what the outputs may be (`fitting_heads`).
        is_bytes: the graph takes uint8, and scales by itself.
    """
    for kind, name, spec in _changes(base, heads, is_bytes):
        if kind not in base.kinds:
            names = (base.name, name) if base.kinds else (name,)
            yield Alternative(", ".join(names), (*base.kinds, kind), spec)


def _changes(base: Alternative, heads: Sequence[Head], is_bytes: bool) -> Iterator[tuple[Kind, str, ModelSpec]]:
    spec, image = base.spec, base.spec.input
    if image.color != "gray":
        color = "rgb" if image.color == "bgr" else "bgr"
        # Means that the user has written stay in his order; those that we have chosen are of a colour each.
        ours = {"mean": image.mean[::-1], "std": image.std[::-1]} if "values" in base.kinds else {}
        yield "color", f"color: {color}", _with_input(spec, {"color": color, **ours})
    if image.resize in ("letterbox", "stretch") and not open_task(spec).expects_crops:
        for name, keys in _RESIZES.items():
            if any(getattr(image, key) != value for key, value in keys.items()):
                yield "resize", name, _with_input(spec, keys)
    for name, keys in () if is_bytes else _ranges(image).items():
        changed = _with_input(spec, keys)
        if not same_values(changed.input, image):
            yield "values", name, changed
    for decoder in dict.fromkeys(head.decoder for head in heads):
        if spec.decoder is not None and decoder != spec.decoder:
            yield "decoder", f"decoder: {decoder}", spec.model_copy(update={"decoder": decoder})


def _ranges(image: InputSpec) -> Mapping[str, Mapping[str, Any]]:
    """Return the usual ranges of a network's values, by name: the keys of `input` that make them."""
    imagenet = as_listed = {key: tuple(values) for key, values in IMAGENET.items()}
    if image.color == "bgr":
        imagenet = {key: values[::-1] for key, values in imagenet.items()}
    elif image.color == "gray":
        imagenet = {key: (round(float(np.mean(values)), 4),) for key, values in imagenet.items()}
    return {
        "values 0 to 255": _UNSCALED,
        "values 0 to 1": {**_UNSCALED, "scale": 1 / 255},
        "values -1 to 1": {"scale": 1.0, "mean": (127.5,), "std": (127.5,)},
        "values as for ImageNet": {"scale": 1 / 255, **imagenet},
        # PaddleOCR's, and whoever forgets to turn them round
        **({"values as for ImageNet's RGB": {"scale": 1 / 255, **as_listed}} if image.color == "bgr" else {}),
    }


def _with_input(spec: ModelSpec, keys: Mapping[str, Any]) -> ModelSpec:
    changed = InputSpec.model_validate({**spec.input.model_dump(), **keys})
    return spec.model_copy(update={"input": changed})


def same_values(first: InputSpec, second: InputSpec) -> bool:
    """Return True where black and white become nearly the same values in both."""
    ends = [
        (np.array([[0.0], [255.0]]) * image.scale - np.array(image.mean)) / np.array(image.std)
        for image in (first, second)
    ]
    widest = max(float(np.ptp(values, axis=0).max()) for values in ends)
    return bool(np.abs(ends[0] - ends[1]).max() <= _SAME * widest)
