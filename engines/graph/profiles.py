"""Choose the shapes that an engine is compiled for."""

from __future__ import annotations

from onnx import ModelProto

from engines.errors import EngineError
from engines.graph.load import image_input
from engines.graph.topology import trial_shape
from engines.interface import BuildRequest, Profile, ShapeRange, TensorSpec


def profiles_for(graph: ModelProto, request: BuildRequest) -> tuple[Profile, ...]:
    """Return the profiles of a graph: none if no dimension is open, those of the request, or one of its input shape.

    Raises EngineError (`engine.profile`) for a profile of another input or another rank, or that changes a dimension
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
        if not image.accepts(shape):
            raise _wrong(f"{bound} {list(shape)}", f"{fixed}, as the model has '{image.name}'")
    if not all(a <= b <= c for a, b, c in zip(shapes.min, shapes.opt, shapes.max, strict=True)):
        raise _wrong(f"{shapes}", "min <= opt <= max in every dimension")


def _wrong(found: str, expected: str) -> EngineError:
    return EngineError("engine.profile", found, expected, "correct `profiles` in the model spec")
