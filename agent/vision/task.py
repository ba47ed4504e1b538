"""One model's way from a frame to a prediction: preprocess before the engine, decode after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent.camera.capture import Frame
from agent.vision.decode import Decoder, Prediction, open_decoder
from agent.vision.preprocess import Geometry, Preprocessor, network_input
from agent.vision.spec import ModelSpec
from engines.interface import Array, Engine, ImageEngine, OverlappingEngine, TensorSpec
from engines.trace import span


@dataclass(frozen=True)
class ServedFrame:
    """A frame as it was answered: by which engine, with what, when it was done, and how long the engine took.

    geometry: where the frame lay in the network input, in whose pixels a detector answers; None: in the frame's own.
    together: how many frames were inferred at once, of whose time this one's is an equal share.
    """

    frame: Frame
    engine_id: str
    result: Prediction
    done_ns: int
    inferred_s: float
    geometry: Geometry | None = None
    together: int = 1


POLL_S = 5e-4  # between two questions to a device
_OPEN_DECODERS = 8  # for so many sizes of the network input; more sizes than a few take turns only while calibrating


Outputs = Mapping[str, Array]


class Inference(Protocol):
    """An inference under way."""

    @property
    def tells(self) -> bool:
        """Whether somebody hears of its end at once."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it is known to be over."""
        ...

    def wait(self, timeout_s: float) -> None:
        """For its end, but no longer."""
        ...

    def result(self) -> tuple[Outputs, float, float]:
        """The outputs by name, once they are there, and when it began and ended (monotonic s). Raises its error."""
        ...


Submit = Callable[[Callable[[], Outputs]], Inference]


class DeviceInference:
    """An inference that an engine computes beside the thread that has begun it; the device is asked for its end."""

    tells = False

    def __init__(self, engine: OverlappingEngine, ticket: int) -> None:
        self._engine = engine
        self._ticket = ticket
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    @property
    def ended(self) -> bool:
        if self._ended_s is None and self._engine.is_done(self._ticket):
            self._ended_s = time.monotonic()
        return self._ended_s is not None

    def wait(self, timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while not self.ended and (left_s := give_up_at - time.monotonic()) > 0.0:
            time.sleep(min(POLL_S, left_s))

    def result(self) -> tuple[Outputs, float, float]:
        with span("infer"):
            outputs = self._engine.finish(self._ticket)
        return outputs, self._began_s, self._ended_s if self._ended_s is not None else time.monotonic()


@dataclass(frozen=True)
class PendingInference:
    """Frames whose inference has begun, at `began_s` (monotonic); shape: of the network input of each."""

    inference: Inference
    shape: tuple[int, ...]
    geometries: Sequence[Geometry]
    began_s: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        return len(self.geometries)


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
        self._batch: Array = np.empty(0)
        self.inferred_s = 0.0  # by the engine, for the frame of the last `infer`
        self._engine: Engine | None = None  # the last one that inferred
        self._image_engine: ImageEngine | None = None  # the same, where it preprocesses itself
        self._overlapping: OverlappingEngine | None = None  # the same, where it computes beside the thread that asks

    def infer(self, engine: Engine, image: NDArray[np.uint8]) -> tuple[Prediction, Geometry]:
        """The prediction for a frame, BGR uint8 (H, W, 3), and where the frame lay in the network input.

        An engine that preprocesses does it itself; every other gets what `preprocess` makes.
        """
        run, shape, geometry = self._make_ready(engine, image)
        started_ns = time.perf_counter_ns()
        outputs = run()
        self.inferred_s = (time.perf_counter_ns() - started_ns) / 1e9
        with span("decode"):
            return self.decode(outputs, shape), geometry

    def begin(self, engine: Engine, images: Sequence[NDArray[np.uint8]], submit: Submit) -> PendingInference:
        """Begin with frames as for `infer`, several at once as a batch; `decoded` makes predictions of their outputs.

        submit: runs what blocks beside the calling thread; not needed by an engine that computes beside it anyway.
        Until the outputs are there, no others may be begun.
        """
        self._look_at(engine)
        if len(images) > 1:
            return self._begin_batch(engine, images, submit)
        if self._overlapping is not None:
            return self._begin_on_device(self._overlapping, images[0])
        run, shape, geometry = self._make_ready(engine, images[0])
        return PendingInference(submit(run), shape, [geometry])

    def decoded(self, outputs: Outputs, begun: PendingInference) -> list[Prediction]:
        """The predictions for frames that were begun, of their outputs."""
        with span("decode"):
            if len(begun) == 1:
                return [self.decode(outputs, begun.shape)]
            each = ({name: output[row : row + 1] for name, output in outputs.items()} for row in range(len(begun)))
            return [self.decode(row, begun.shape) for row in each]

    def _begin_batch(self, engine: Engine, images: Sequence[NDArray[np.uint8]], submit: Submit) -> PendingInference:
        """On the host, also for an engine that preprocesses single frames itself."""
        geometries = []
        with span("preprocess"):
            for row, image in enumerate(images):
                tensor, geometry = self.preprocess(image)
                if self._batch.shape[1:] != tensor.shape[1:] or len(self._batch) < len(images):
                    self._batch = np.empty((len(images), *tensor.shape[1:]), tensor.dtype)
                self._batch[row] = tensor[0]
                geometries.append(geometry)
        batch, overlapping = self._batch[: len(images)], self._overlapping
        if overlapping is not None:
            return PendingInference(DeviceInference(overlapping, overlapping.start(batch)), tensor.shape, geometries)
        return PendingInference(submit(lambda: _inferred(lambda: engine.infer(batch))), tensor.shape, geometries)

    def infer_each(self, engine: Engine, images: Iterable[NDArray[np.uint8]]) -> Iterator[tuple[Prediction, Geometry]]:
        """As `infer`, for one after the other. While an engine that can computes one, the next is read and uploaded."""
        if not isinstance(engine, OverlappingEngine):
            yield from (self.infer(engine, image) for image in images)
            return
        under_way: PendingInference | None = None
        for image in images:
            begun = self._begin_on_device(engine, image)
            if under_way is not None:
                yield self._finished(under_way)
            under_way = begun
        if under_way is not None:
            yield self._finished(under_way)

    def _begin_on_device(self, engine: OverlappingEngine, image: NDArray[np.uint8]) -> PendingInference:
        transform, geometry = self._preprocess.transform(image)
        return PendingInference(
            DeviceInference(engine, engine.start_image(image, transform)), transform.input_shape, [geometry]
        )

    def _finished(self, begun: PendingInference) -> tuple[Prediction, Geometry]:
        outputs, _, _ = begun.inference.result()
        return self.decoded(outputs, begun)[0], begun.geometries[0]

    def _make_ready(
        self, engine: Engine, image: NDArray[np.uint8]
    ) -> tuple[Callable[[], Outputs], tuple[int, ...], Geometry]:
        """What infers it, the shape (1, C, h, w) of its network input, and where the frame lies in that."""
        self._look_at(engine)
        image_engine = self._image_engine
        if image_engine is not None:
            transform, geometry = self._preprocess.transform(image)
            return (
                (lambda: _inferred(lambda: image_engine.infer_image(image, transform))),
                transform.input_shape,
                geometry,
            )
        with span("preprocess"):
            tensor, geometry = self.preprocess(image)
        return (lambda: _inferred(lambda: engine.infer(tensor))), tensor.shape, geometry

    def _look_at(self, engine: Engine) -> None:
        """What it can; not for every frame: looking for a Protocol's members costs microseconds."""
        if engine is not self._engine:
            self._engine = engine
            self._image_engine = engine if isinstance(engine, ImageEngine) else None
            self._overlapping = engine if isinstance(engine, OverlappingEngine) else None

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


def _inferred(run: Callable[[], Outputs]) -> Outputs:
    with span("infer"):
        return run()
