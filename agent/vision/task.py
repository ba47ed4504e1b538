"""Take one model's way from a frame to a prediction: preprocess, infer, decode.

`VisionTask` does it for one thread: in one call (`infer`), or in two (`start`, `decode_batch`), so that the caller can
prepare the next frame while an engine computes. An engine that computes in parallel is waited for by `DeviceInference`;
for the others the caller brings a thread of its own. `ServedFrame` is the answer that the frame path hands on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.vision.answer import Answer, Decoder
from agent.vision.boxes import Part
from agent.vision.preprocess import Geometry, Preprocessor, network_input
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from engines.interface import Array, Engine, OverlappingEngine, TensorSpec
from engines.trace import span

if TYPE_CHECKING:  # a job's child process has no cameras, and imports their modules for nothing
    from agent.camera.capture import Frame

Show = Callable[["ServedFrame"], "ServedFrame"]  # as a policy lets an answer be shown
POLL_S = 5e-4  # between two questions to a device
_OPEN_DECODERS = 8  # for so many sizes of the network input; more sizes than a few take turns only while calibrating
_NO_IMAGE: NDArray[np.uint8] = np.empty((0, 0, 3), np.uint8)

Outputs = Mapping[str, Array]


@dataclass(frozen=True)
class ServedFrame:
    """A frame with the answer that it got.

    Args:
        engine_id: the engine that answered.
        done_ns: monotonic clock when the answer was there.
        inferred_s: how long the engine took; an equal share for each frame of a batch.
        geometry: where the frame lay in the network input, in whose pixels a detector answers; None: in the frame's.
        batch_size: how many frames were inferred at once.
    """

    frame: Frame
    engine_id: str
    result: Answer
    done_ns: int
    inferred_s: float
    geometry: Geometry | None = None
    batch_size: int = 1

    @cached_property
    def without_image(self) -> ServedFrame:
        """The answer with an empty image, to be kept for longer: a frame's image takes MB.

        Made once for all who keep it.
        """
        return replace(self, frame=replace(self.frame, image=_NO_IMAGE))


def as_served(served: ServedFrame) -> ServedFrame:
    """Return an answer as it is: where no policy holds."""
    return served


class Inference(Protocol):
    """An inference under way."""

    notifies: bool  # the end wakes somebody up at once; else it has to be polled

    @property
    def is_done(self) -> bool: ...

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, but no longer than `timeout_s`."""

    def result(self) -> tuple[Outputs, float, float]:
        """Wait, and return the outputs by name, the start and the end (monotonic s). Raises the inference's error."""


Submit = Callable[[Callable[[], Outputs]], Inference]


class DeviceInference:
    """An inference that an engine computes in parallel to the caller; the device is polled for its end."""

    notifies = False

    def __init__(self, engine: OverlappingEngine, ticket: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._ticket = ticket
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._ended_s: float | None = None

    @property
    def is_done(self) -> bool:
        if self._ended_s is None and self._engine.is_done(self._ticket):
            self._ended_s = self._clock.monotonic_s()
        return self._ended_s is not None

    def wait(self, timeout_s: float) -> None:
        give_up_s = self._clock.monotonic_s() + timeout_s
        while not self.is_done and (left_s := give_up_s - self._clock.monotonic_s()) > 0.0:
            self._clock.sleep(min(POLL_S, left_s))

    def result(self) -> tuple[Outputs, float, float]:
        with span("infer"):
            outputs = self._engine.finish(self._ticket)
        return outputs, self._started_s, self._ended_s if self._ended_s is not None else self._clock.monotonic_s()


@dataclass(frozen=True)
class PendingInference:
    """Frames whose inference was started.

    Args:
        shape: of the network input of each frame.
        geometries: where each frame lies in its network input.
    """

    inference: Inference
    shape: tuple[int, ...]
    geometries: Sequence[Geometry]

    def __len__(self) -> int:
        return len(self.geometries)


class VisionTask:
    """Preprocess frames and decode outputs of one model. Holds buffers: one per thread."""

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare for a model.

        Args:
            spec: The model's.
            inputs: The engine's; the first is the image.
            outputs: The engine's.

        Raises ConfigError when the spec does not fit the model's inputs or outputs.
        """
        self._clock = clock
        self._network = network = network_input(spec, inputs[0])
        self._preprocess = Preprocessor(spec.input, network)

        task = open_task(spec)
        self._answers_padding = task.answers_padding and spec.input.has_padding

        @lru_cache(maxsize=_OPEN_DECODERS)
        def decoder_for(shape: tuple[int, ...]) -> Decoder:
            return task.open_decoder(network.size(shape), outputs)

        self._decoder_for = decoder_for
        decoder_for(network.shape(network.usual_size))
        self._batch: Array = np.empty(0)
        self.inferred_s = 0.0  # by the engine, for the frame of the last `infer`
        self._engine: Engine | None = None  # the last one that inferred
        self._overlapping: OverlappingEngine | None = None  # the same, where it preprocesses and computes in parallel

    def infer(self, engine: Engine, image: NDArray[np.uint8]) -> tuple[Answer, Geometry]:
        """Return the prediction for a frame, BGR uint8 (H, W, 3), and where the frame lay in the network input.

        An engine that preprocesses does it itself; every other gets the output of `preprocess`.
        """
        run, shape, geometry = self._prepare(engine, image)
        started_ns = self._clock.monotonic_ns()
        outputs = run()
        self.inferred_s = (self._clock.monotonic_ns() - started_ns) / 1e9
        with span("decode"):
            return self._decode_frame(outputs, shape, geometry), geometry

    def infer_each(self, engine: Engine, images: Iterable[NDArray[np.uint8]]) -> Iterator[tuple[Answer, Geometry]]:
        """Infer one frame after another. While an overlapping engine computes, the next frame is read and uploaded."""
        if not isinstance(engine, OverlappingEngine):
            yield from (self.infer(engine, image) for image in images)
            return
        pending: PendingInference | None = None
        for image in images:
            started = self._start_on_device(engine, image)
            if pending is not None:
                yield self._finish(pending)
            pending = started
        if pending is not None:
            yield self._finish(pending)

    def start(self, engine: Engine, images: Sequence[NDArray[np.uint8]], submit: Submit) -> PendingInference:
        """Start the inference of one frame, or of several at once as a batch.

        Make predictions of its outputs with `decode_batch`. Start no other before these outputs are there.

        Args:
            submit: runs a blocking call in another thread; not used for an engine that overlaps by itself.
        """
        self._note_ability(engine)
        overlapping = self._overlapping
        if len(images) == 1:
            if overlapping is not None:
                return self._start_on_device(overlapping, images[0])
            run, shape, geometry = self._prepare(engine, images[0])
            return PendingInference(submit(run), shape, [geometry])
        geometries = []
        with span("preprocess"):  # on the host, also for an engine that preprocesses single frames itself
            for row, image in enumerate(images):
                tensor, geometry = self.preprocess(image)
                if self._batch.shape[1:] != tensor.shape[1:] or len(self._batch) < len(images):
                    self._batch = np.empty((len(images), *tensor.shape[1:]), tensor.dtype)
                self._batch[row] = tensor[0]
                geometries.append(geometry)
        batch = self._batch[: len(images)]
        if overlapping is not None:
            inference = DeviceInference(overlapping, overlapping.start(batch), self._clock)
            return PendingInference(inference, tensor.shape, geometries)
        return PendingInference(submit(partial(_run, engine.infer, batch)), tensor.shape, geometries)

    def decode_batch(self, outputs: Outputs, started: PendingInference) -> list[Answer]:
        """Return the predictions for frames that were started, from their outputs."""
        with span("decode"):
            if len(started) == 1:
                return [self._decode_frame(outputs, started.shape, started.geometries[0])]
            return [
                self._decode_frame(
                    {name: output[row : row + 1] for name, output in outputs.items()}, started.shape, geometry
                )
                for row, geometry in enumerate(started.geometries)
            ]

    def preprocess(self, image: NDArray[np.uint8]) -> tuple[Array, Geometry]:
        """Return the network input of a frame, BGR uint8 (H, W, 3), which the next call may overwrite."""
        return self._preprocess(image)

    def decode(self, outputs: Mapping[str, Array], shape: tuple[int, ...], part: Part | None = None) -> Answer:
        """Return the prediction for a batch of one, in pixels of the network input, which has this shape.

        part: Of the input, which the frame covers; None: all of it.
        """
        answer = self._decoder_for(shape)(outputs)
        return answer if part is None else answer.without_padding(part, self._network.size(shape))

    def answer(self, outputs: Mapping[str, Array], tensor: Array, geometry: Geometry | None = None) -> Answer:
        """Return the prediction for a network input of one frame, in its pixels, from an engine's outputs for it.

        geometry: Where the frame lies in it; None: the tensor was kept without.
        """
        if geometry is not None:
            return self._decode_frame(outputs, tensor.shape, geometry)
        return self.decode(outputs, tensor.shape, self._preprocess.part_of(tensor) if self._answers_padding else None)

    def _decode_frame(self, outputs: Mapping[str, Array], shape: tuple[int, ...], geometry: Geometry) -> Answer:
        part = geometry.part(self._network.size(shape)) if self._answers_padding else None
        return self.decode(outputs, shape, part)

    def _prepare(
        self, engine: Engine, image: NDArray[np.uint8]
    ) -> tuple[Callable[[], Outputs], tuple[int, ...], Geometry]:
        """Return the call that infers a frame, the shape of its network input, and where the frame lies in that."""
        self._note_ability(engine)
        if (device := self._overlapping) is not None:
            transform, geometry = self._preprocess.transform(image)
            run = partial(_run, lambda: device.finish(device.start_image(image, transform)))
            return run, transform.input_shape, geometry
        with span("preprocess"):
            tensor, geometry = self.preprocess(image)
        return partial(_run, engine.infer, tensor), tensor.shape, geometry

    def _note_ability(self, engine: Engine) -> None:
        """Ask a new engine if it overlaps; not for every frame: checking a Protocol's members costs microseconds."""
        if engine is not self._engine:
            self._engine = engine
            self._overlapping = engine if isinstance(engine, OverlappingEngine) else None

    def _start_on_device(self, engine: OverlappingEngine, image: NDArray[np.uint8]) -> PendingInference:
        transform, geometry = self._preprocess.transform(image)
        inference = DeviceInference(engine, engine.start_image(image, transform), self._clock)
        return PendingInference(inference, transform.input_shape, [geometry])

    def _finish(self, started: PendingInference) -> tuple[Answer, Geometry]:
        outputs, _, _ = started.inference.result()
        return self.decode_batch(outputs, started)[0], started.geometries[0]


def _run(infer: Callable[..., Outputs], *arguments: Any) -> Outputs:
    with span("infer"):
        return infer(*arguments)
