"""The kernel `preprocess` against its plain reference, to the last bit: in fibers on the CPU, and on a GPU.

That the reference is what OpenCV answers, tests/engines/cuda/test_preprocess_paths.py shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from fiber_executor import COMPILER, FiberExecutor
from kernel_reference import preprocessed, transforms
from numpy.typing import NDArray
from opened_gpu import opened_gpu

from engines.cuda.kernels import Argument, CudaExecutor, DevicePreprocess, KernelGeometry
from engines.preprocessing import HEADER, TAP, ImageTransform

GEOMETRY = KernelGeometry(11, 2, 128)
PLAIN = ImageTransform(9, 7, 9, 7, 0, 0, 9, 7, 0, "bgr", (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
CAMERA = replace(
    PLAIN, frame_height=240, frame_width=320, inner_height=96, inner_width=128, top=16, height=128, width=128, pad=114,
    color="rgb", gain=(0.017, 0.0175, 0.0174), bias=(-2.1, -2.0, -1.8),
)  # fmt: skip


@pytest.fixture(scope="module", params=["fibers", pytest.param("gpu", marks=pytest.mark.gpu)])
def executor(request: pytest.FixtureRequest) -> Iterator[CudaExecutor]:
    if request.param == "fibers":
        if COMPILER is None:
            pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
        yield cast("CudaExecutor", FiberExecutor(GEOMETRY))
        return
    with opened_gpu() as gpu, gpu.current():
        cuda = CudaExecutor(gpu, GEOMETRY)
        yield cuda
        cuda.close()


class Recording:
    """The executor, with what is uploaded and allocated counted, and launches kept."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.geometry, self._executor = executor.geometry, executor
        self.uploads: list[int] = []  # bytes of each
        self.launches: list[int] = []  # blocks of each
        self.resident_blocks, self.download = executor.resident_blocks, executor.download
        self.empty, self.zeros = executor.empty, executor.zeros

    def upload(self, array: NDArray[np.generic], stream: object | None) -> object:
        self.uploads.append(array.nbytes)
        return self._executor.upload(array, stream)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], stream: object | None) -> None:
        self.launches.append(blocks)
        self._executor.launch(kernel, blocks, arguments, stream)


def pixels(transform: ImageTransform, seed: int = 0) -> NDArray[np.uint8]:
    size = (transform.frame_height, transform.frame_width, 3)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def run(
    executor: CudaExecutor, preprocess: DevicePreprocess, transform: ImageTransform, frame: NDArray[np.uint8]
) -> NDArray[np.generic]:
    lying = executor.upload(frame, None)
    made = executor.empty(transform.input_shape, transform.dtype)
    preprocess.run(transform, lying.address, made.address)
    return executor.download(made, None)


def test_small_frames_of_every_kind(executor: CudaExecutor) -> None:
    preprocess = DevicePreprocess(executor)
    for transform in transforms(np.random.default_rng(1), 96, 40):
        frame = pixels(transform)
        assert run(executor, preprocess, transform, frame).tobytes() == preprocessed(transform, frame).tobytes()


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_frames_may_lie_anywhere(executor: CudaExecutor, offset: int) -> None:
    """A decoder's rows begin where they like, and an address need not be even."""
    rows = np.random.default_rng(0).integers(0, 256, (9, 7 * 3 + 11), np.uint8)
    lying = executor.upload(np.concatenate((np.zeros(offset, np.uint8), rows.reshape(-1))), None)
    made = executor.empty((1, 3, 9, 7), np.float32)
    DevicePreprocess(executor).run(PLAIN, lying.address + offset, made.address, row_bytes=rows.shape[1])
    wanted = rows[:, :21].reshape(9, 7, 3).transpose(2, 0, 1).astype(np.float32)
    assert np.array_equal(executor.download(made, None)[0], wanted)


def test_tables_are_uploaded_once_for_each_transform(executor: CudaExecutor) -> None:
    recording = Recording(executor)
    preprocess = DevicePreprocess(recording)  # type: ignore[arg-type]  # its upload returns the executor's own buffer
    turned = replace(CAMERA, color="bgr")
    for transform, seed in ((CAMERA, 0), (CAMERA, 1), (replace(CAMERA), 2), (turned, 3), (turned, 4), (CAMERA, 5)):
        frame = pixels(transform, seed)
        assert run(executor, preprocess, transform, frame).tobytes() == preprocessed(transform, frame).tobytes()
    assert recording.uploads == [HEADER.itemsize + (128 + 128) * TAP.itemsize] * 2  # one for each transform
    assert recording.launches == [128 * 128 // GEOMETRY.threads] * 6
