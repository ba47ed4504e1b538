"""One model's way from a frame to a prediction: preprocess before the engine, decode after it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agent.decode import Decoder, Prediction, open_decoder
from agent.fitting import Geometry
from agent.model_spec import ModelSpec
from agent.network_input import network_input
from agent.preprocess import Preprocessor
from engines.backend import Array, Engine, ImageEngine, OverlappingEngine, TensorSpec
from engines.preprocessing import ImageTransform
from engines.trace import span

_OPEN_DECODERS = 8  # for so many sizes of the network input; more sizes than a few take turns only while calibrating


class VisionTask:
    """Preprocessing and decoding of one model. Holds buffers: one per thread."""

    def __init__(self, spec: ModelSpec, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Raises ConfigError when the spec does not fit the model's input or outputs."""
        taken = network_input(spec, inputs[0])
        self._preprocess = Preprocessor(spec.input, taken)

        @lru_cache(maxsize=_OPEN_DECODERS)
        def decoder_for(shape: tuple[int, ...]) -> Decoder:
            return open_decoder(spec, taken.size(shape), outputs)

        self._decoder_for = decoder_for
        self._shape: tuple[int, ...] = taken.shape(taken.usual)
        self._decoder_for(self._shape)
        self.inferred_s = 0.0  # by the engine, for the frame of the last `infer`
        self._engine: Engine | None = None  # the last one that inferred
        self._image_engine: ImageEngine | None = None  # the same, where it preprocesses itself

    def infer(self, engine: Engine, image: NDArray[np.uint8]) -> tuple[Prediction, Geometry]:
        """The prediction for a frame, BGR uint8 (H, W, 3), and where the frame lay in the network input.

        An engine that preprocesses does it itself; every other gets what `preprocess` makes.
        """
        if engine is not self._engine:  # not for every frame: looking for a Protocol's members costs microseconds
            self._engine, self._image_engine = engine, engine if isinstance(engine, ImageEngine) else None
        if self._image_engine is None:
            with span("preprocess"):
                tensor, geometry = self.preprocess(image)
            started_ns = time.perf_counter_ns()
            with span("infer"):
                outputs = engine.infer(tensor)
            self.inferred_s = (time.perf_counter_ns() - started_ns) / 1e9
            with span("decode"):
                return self.decode(outputs), geometry
        transform, geometry = self._preprocess.transform(image)
        started_ns = time.perf_counter_ns()
        with span("infer"):
            outputs = self._image_engine.infer_image(image, transform)
        self.inferred_s = (time.perf_counter_ns() - started_ns) / 1e9
        with span("decode"):
            return self.decode(outputs, transform.input_shape), geometry

    def infer_each(self, engine: Engine, images: Iterable[NDArray[np.uint8]]) -> Iterator[tuple[Prediction, Geometry]]:
        """As `infer`, for one after the other. While an engine that can computes one, the next is read and uploaded."""
        if not isinstance(engine, OverlappingEngine):
            yield from (self.infer(engine, image) for image in images)
            return
        under_way: tuple[int, ImageTransform, Geometry] | None = None
        for image in images:
            transform, geometry = self._preprocess.transform(image)
            begun = engine.start_image(image, transform), transform, geometry
            if under_way is not None:
                yield self._finished(engine, *under_way)
            under_way = begun
        if under_way is not None:
            yield self._finished(engine, *under_way)

    def _finished(
        self, engine: OverlappingEngine, ticket: int, transform: ImageTransform, geometry: Geometry
    ) -> tuple[Prediction, Geometry]:
        with span("infer"):
            outputs = engine.finish(ticket)
        with span("decode"):
            return self.decode(outputs, transform.input_shape), geometry

    def preprocess(self, image: NDArray[np.uint8]) -> tuple[Array, Geometry]:
        """BGR uint8 (H, W, 3) to the network input, which the next call may overwrite."""
        tensor, geometry = self._preprocess(image)
        self._shape = tensor.shape
        return tensor, geometry

    def decode(self, outputs: Mapping[str, Array], shape: tuple[int, ...] | None = None) -> Prediction:
        """The prediction for a batch of one, in network pixels.

        shape: of the network input the outputs are of; by default that of the last one preprocessed.
        """
        return self._decoder_for(shape or self._shape)(outputs)[0]
