"""One model's way from a frame to a prediction: preprocess before the engine, decode after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agent.decode import Prediction, open_decoder
from agent.model_spec import ModelSpec
from agent.preprocess import Geometry, Preprocessor
from engines.backend import Array, TensorSpec


class VisionTask:
    """Preprocessing and decoding of one model. Holds buffers: one per thread."""

    def __init__(self, spec: ModelSpec, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Raises ConfigError when the spec does not fit the model's input or outputs."""
        shape = spec.input_shape(inputs[0])
        self._preprocess = Preprocessor(spec.input, shape)
        self._decode = open_decoder(spec, shape, outputs)

    def preprocess(self, image: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Geometry]:
        """BGR uint8 (H, W, 3) to the network input (1, C, h, w), overwritten by the next call."""
        return self._preprocess(image)

    def decode(self, outputs: Mapping[str, Array]) -> Prediction:
        """The prediction for a batch of one, in network pixels."""
        return self._decode(outputs)[0]
