"""Two ways from a frame to the network input, the CPU's and the device's, that must not differ in a single bit."""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np
import pytest
from fiber_executor import COMPILER, FiberExecutor
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_reference import grey_levels, preprocessed, scaled_levels
from network_inputs import noise
from numpy.typing import NDArray

from agent.vision.boxes import Size
from agent.vision.preprocess import NetworkInput, Preprocessor
from agent.vision.spec import InputSpec
from engines.cuda.kernels import CudaExecutor, DevicePreprocess, KernelGeometry
from engines.preprocessing import Layout, PixelType

SIDES = st.integers(1, 32)
RESIZES = ["letterbox", "stretch", "pad", "native", "nearest", "rect"]
NORMALISED = {"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}


@pytest.fixture(scope="module")
def executor() -> FiberExecutor:
    if COMPILER is None:
        pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
    return FiberExecutor(KernelGeometry(11, 2, 64))


def check(
    executor: FiberExecutor, spec: InputSpec, frame: NDArray[np.uint8], size: Size, layout: Layout, dtype: PixelType
) -> None:
    """CPU, device and plain reference, on one frame."""
    most = (size[0] + 16, size[1] + 16) if spec.follows_frames else size
    preprocessor = Preprocessor(spec, NetworkInput(spec.channels, size, size, most, layout, dtype))
    transform, geometry = preprocessor.transform(frame)
    wanted, where = preprocessor(frame)
    lying, made = executor.upload(frame), executor.empty(wanted.shape, dtype)
    DevicePreprocess(cast("CudaExecutor", executor)).run(transform, lying.address, made.address)
    assert where == geometry
    assert (wanted.shape, wanted.dtype.name) == (transform.input_shape, dtype)
    assert np.array_equal(executor.download(made), wanted)
    assert np.array_equal(preprocessed(transform, frame), wanted)


def numbers(color: str, dtype: PixelType) -> dict[str, object]:
    """Those of floats; bytes stay what they are."""
    if dtype == "uint8":
        return {}
    normalised = {"mean": (127.0,), "std": (128.0,)} if color == "gray" else NORMALISED
    return {"scale": 0.7, **normalised}


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("anchor", ["top-left", pytest.param("center", marks=pytest.mark.trial)])
@pytest.mark.parametrize("color", ["bgr", "rgb", "gray"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_they_are_equal(
    executor: FiberExecutor, resize: str, anchor: str, color: str, layout: Layout, dtype: PixelType
) -> None:
    spec = input_spec(resize=resize, anchor=anchor, color=color, pad=93, **numbers(color, dtype))
    for frame_height, frame_width in ((1, 1), (1, 19), (21, 1), (20, 30), (19, 27), (16, 24), (15, 25)):
        check(executor, spec, noise(frame_height, frame_width), (16, 24), layout, dtype)


def input_spec(**given: object) -> InputSpec:
    return InputSpec.model_validate(given)


@given(
    frame_size=st.tuples(SIDES, SIDES),
    size=st.tuples(SIDES, SIDES),
    resize=st.sampled_from(RESIZES),
    anchor=st.sampled_from(["top-left", "center"]),
    color=st.sampled_from(["bgr", "rgb", "gray"]),
    layout=st.sampled_from(["NCHW", "NHWC"]),
    scale=st.floats(1e-3, 10.0),
    mean=st.floats(-300.0, 300.0),
    std=st.one_of(st.floats(0.01, 300.0), st.floats(-300.0, -0.01)),
)
@example((1, 1), (1, 1), "stretch", "center", "gray", "NCHW", 1.0, 0.0, 1.0)
@example((32, 32), (1, 1), "letterbox", "center", "rgb", "NHWC", 1.0, 0.0, -1.0)
def test_they_are_equal_whatever_the_sizes_and_numbers(
    executor: FiberExecutor, frame_size: Size, size: Size, resize: str, anchor: str, color: str, layout: Layout,
    scale: float, mean: float, std: float,
) -> None:  # fmt: skip
    spec = input_spec(resize=resize, anchor=anchor, color=color, scale=scale, mean=(mean,), std=(std,))
    check(executor, spec, noise(*frame_size), size, layout, "float32")
    plain = input_spec(resize=resize, anchor=anchor, color=color)
    check(executor, plain, noise(*frame_size), size, layout, "uint8")


def test_the_reference_is_opencv_s_resize() -> None:
    rng = np.random.default_rng(0)
    for most in (*[6] * 25, *[60] * 25, *[400] * 10, 1500, 1500):
        frame_height, frame_width, height, width = rng.integers(1, most, 4)
        frame = noise(frame_height, frame_width)
        resized = cv2.resize(frame, (int(width), int(height)), interpolation=cv2.INTER_LINEAR)
        assert np.array_equal(scaled_levels(frame, height, width), resized)


def test_a_grey_level_is_that_of_opencv_for_every_colour() -> None:
    frame = np.empty((256, 256, 3), np.uint8)
    frame[..., 1], frame[..., 2] = np.meshgrid(np.arange(256), np.arange(256))
    for blue in range(256):
        frame[..., 0] = blue
        assert np.array_equal(grey_levels(frame.astype(np.int32)), cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY))
