"""Optimization profiles: the shapes an engine is built for, checked before the builder would say less about them."""

from __future__ import annotations

from onnx import ModelProto

from engines.backend import BuildRequest, EngineError, Profile, ShapeRange, TensorSpec
from engines.graph import image_input
from engines.topology import trial_shape


def profiles_for(graph: ModelProto, request: BuildRequest) -> tuple[Profile, ...]:
    """The profiles of a graph: none where nothing is open, those of the request, or one of its input shape alone.

    Raises EngineError (`engine.profile`) for a profile of another input, of another rank, or that moves a dimension
    which the model fixes.
    """
    image = image_input(graph)
    for profile in request.profiles:
        _check(profile, image)
    if None not in image.shape:
        return ()
    shape = request.input_shape or trial_shape(image.shape)
    return request.profiles or ({image.name: ShapeRange(shape, shape, shape)},)


def _check(profile: Profile, image: TensorSpec) -> None:
    if set(profile) != {image.name}:
        raise _wrong(f"a profile for {', '.join(map(repr, profile)) or 'no input'}", f"one for input '{image.name}'")
    shapes = profile[image.name]
    for bound in ("min", "opt", "max"):
        shape: tuple[int, ...] = getattr(shapes, bound)
        fixed = [size if size is not None else "any" for size in image.shape]
        fits = len(shape) == len(image.shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(shape, image.shape, strict=True)
        )
        if not fits:
            raise _wrong(f"{bound} {list(shape)}", f"{fixed}, as the model has '{image.name}'")
    if not all(a <= b <= c for a, b, c in zip(shapes.min, shapes.opt, shapes.max, strict=True)):
        raise _wrong(f"{shapes}", "min <= opt <= max in every dimension")


def _wrong(found: str, expected: str) -> EngineError:
    return EngineError("engine.profile", found, expected, "correct `profiles` in the model spec")
