"""Give the inputs of a graph that are no image their values: each becomes an initialiser of the graph.

Detectors of the DETR family take the size of the picture beside the image, for one. Whoever reads the graph afterwards
sees a model of one input: builders, exporters, and the hash that identifies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from engines.errors import EngineError
from engines.graph.topology import Dim, graph_inputs, replace_items, type_name, value_type
from engines.interface import Array
from engines.preprocessing import image_layout

Constants = Mapping[str, Any]  # by the input's name: a number, or nested lists of numbers

NO_CONSTANTS: Constants = {}

_CORRECT = "correct it under 'inputs' in the spec"
_MOST_VALUES = 1 << 24  # that one constant may have; a model's file may declare an input of any size
_MOST_SHOWN = 80  # characters of a constant
_FIRST_IR_OF_BARE_INITIALIZERS = 4  # before it, initialisers had to be inputs, too
# What inputs of known names get, of the height and width of the network's input, so that boxes come in its pixels:
# RT-DETR, D-FINE and DEIM; PaddleDetection; YOLOv3 of the ONNX model zoo; Caffe's Faster R-CNN.
_BOX_SIZE = "orig_target_sizes"
_KNOWN: Mapping[str, Callable[[int, int], list[int]]] = {
    _BOX_SIZE: lambda height, width: [width, height],
    "im_shape": lambda height, width: [height, width],
    "scale_factor": lambda _height, _width: [1, 1],
    "image_shape": lambda height, width: [height, width],
    "im_info": lambda height, width: [height, width, 1],
}


def pin_inputs(model: ModelProto, constants: Constants) -> None:
    """Replace inputs of a model by constants.

    A constant takes the type of its input. It is broadcast to the input's shape, so that a batch axis may be left out;
    an open dimension is as long as the constant is there, 1 where the constant lacks it.

    Raises EngineError (`model.constant`) for a name that no input has, and a value that the input cannot take.
    """
    values = {value.name: value for value in graph_inputs(model)}
    for name, constant in constants.items():
        if name not in values:
            found = f"a constant for '{name}', which is none of the inputs {_listed(list(values.values()))}"
            raise _unfit(found, "names of the model's inputs", "correct the name under 'inputs' in the spec")
        model.graph.initializer.append(numpy_helper.from_array(_as_declared(values[name], constant), name))
    if model.ir_version >= _FIRST_IR_OF_BARE_INITIALIZERS:
        replace_items(model.graph.input, [value for value in model.graph.input if value.name not in constants])


def _as_declared(value: ValueInfoProto, constant: Any) -> Array:
    """Return a constant in the type and the shape of its input."""
    declared = value_type(value)
    text = str(constant)
    shown = f"{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'} for input {described(value)}"
    if declared.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING) or declared.shape is None:
        raise _unfit(shown, "an input of numbers, of a known rank", "export the model without that input")
    dtype = helper.tensor_dtype_to_np_dtype(declared.elem_type)
    try:
        given = np.array(constant)
        with np.errstate(all="ignore"):
            cast = given.astype(dtype)
            is_kept = np.isfinite(cast).all() if np.issubdtype(dtype, np.floating) else (cast == given).all()
    except (TypeError, ValueError, OverflowError):  # lists of unequal lengths
        is_kept = False
    if not is_kept or given.dtype.kind not in "biuf":
        raise _unfit(shown, f"numbers that {dtype} holds", _CORRECT)
    shape = _closed(declared.shape, cast.shape)
    try:
        if math.prod(shape) > _MOST_VALUES:
            raise ValueError
        return np.ascontiguousarray(np.broadcast_to(cast, shape))
    except ValueError:
        expected = "a value of that shape, whose first axes may be left out"
        raise _unfit(f"{shown}, of shape {list(cast.shape)}", expected, _CORRECT) from None


def _closed(shape: Sequence[Dim], given: Sequence[int]) -> list[int]:
    """Return the shape of an input, its open dimensions as the constant has them."""
    own = [1] * (len(shape) - len(given)) + list(given)
    return [side if _is_size(side) else own[axis] for axis, side in enumerate(shape)]


def _is_size(side: Dim) -> TypeGuard[int]:
    return isinstance(side, int) and side > 0


def image_and_others(model: ModelProto) -> tuple[ValueInfoProto | None, list[ValueInfoProto]]:
    """Return the one input of an image's shape, and the others; no image where none can be it, or several can."""
    values = graph_inputs(model)
    shaped = [value for value in values if image_layout(value_type(value).shape or ()) is not None]
    typed = [value for value in shaped if value_type(value).elem_type in (TensorProto.FLOAT, TensorProto.UINT8)]
    images = typed or shaped
    if len(images) != 1:
        return None, values
    return images[0], [value for value in values if value is not images[0]]


def proposed_constants(model: ModelProto) -> dict[str, list[int] | None]:
    """Return what each input beside the image gets, so that boxes come in pixels of the network's input.

    None stands where the name is not known, or height and width of the image are open. Without an image there is
    nothing to propose.
    """
    image, others = image_and_others(model)
    if image is None:
        return {}
    shape = value_type(image).shape or ()
    sides = shape[2:] if image_layout(shape) == "NCHW" else shape[1:3]
    return {value.name: _proposed(value, sides) for value in others}


def _proposed(value: ValueInfoProto, sides: Sequence[Dim]) -> list[int] | None:
    closed = [side for side in sides if _is_size(side)]
    if value.name not in _KNOWN or len(closed) < len(sides):
        return None
    proposal = _KNOWN[value.name](*closed)
    try:
        _as_declared(value, proposal)
    except EngineError:  # an input of that name with another meaning
        return None
    return proposal


def box_size(constants: Constants) -> tuple[float, float] | None:
    """Return the (height, width) of the picture in whose pixels a model's boxes come; None where no constant says it.

    Raises EngineError (`model.constant`) for a side that is not positive.
    """
    if _BOX_SIZE not in constants:
        return None
    first = np.atleast_2d(np.array(constants[_BOX_SIZE], np.float64))[0]
    width, height = np.broadcast_to(first, 2).tolist()
    if not min(width, height) > 0.0:
        found = f"{constants[_BOX_SIZE]} for input '{_BOX_SIZE}'"
        raise _unfit(found, "a positive width and height in pixels", _CORRECT)
    return height, width


def described(value: ValueInfoProto) -> str:
    """Return an input in words: its name, type and shape."""
    declared = value_type(value)
    shape = "of unknown rank" if declared.shape is None else str([dim or "?" for dim in declared.shape])
    return f"'{value.name}': {type_name(declared.elem_type)} {shape}"


def _listed(values: Sequence[ValueInfoProto]) -> str:
    return ", ".join(f"({described(value)})" for value in values) or "(none)"


def _unfit(found: str, expected: str, remedy: str) -> EngineError:
    return EngineError("model.constant", found, expected, remedy)
