"""The compiled pass against OpenCV's, to the last bit, and within the bounds of the frame."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_inputs import of_size
from numpy.typing import NDArray

import engines
from agent.vision.preprocess import Preprocessor
from agent.vision.spec import InputSpec
from calibrate.native import open_library
from engines.preprocessing import HostPreprocess

SIDES = st.integers(1, 150)
PAGE = mmap.PAGESIZE

IS_BUILT = HostPreprocess.takes(Preprocessor(InputSpec(), of_size(8, 8)).transform(np.zeros((16, 16, 3), np.uint8))[0])

needs_it = pytest.mark.skipif(
    not IS_BUILT and "TARED_REQUIRE_COMPILED" not in os.environ,
    reason="engines/resize.c is not built: install a C compiler, then pip install --editable .",
)


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def sparse(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same pixels with a byte between them, which are for OpenCV."""
    wide = np.zeros((*frame.shape[:2], 4), np.uint8)
    wide[..., :3] = frame
    return wide[..., :3]


@needs_it
def test_it_was_compiled_when_the_package_was_installed() -> None:
    assert IS_BUILT


@needs_it
@settings(max_examples=150)
@given(
    frame=st.tuples(SIDES, SIDES),
    size=st.tuples(SIDES, SIDES),
    resize=st.sampled_from(["letterbox", "stretch"]),
    anchor=st.sampled_from(["top-left", "center"]),
    color=st.sampled_from(["bgr", "rgb"]),
    mean=st.floats(-300.0, 300.0),
    std=st.floats(0.01, 300.0),
)
def test_it_equals_the_passes_of_opencv(
    frame: tuple[int, int], size: tuple[int, int], resize: str, anchor: str, color: str, mean: float, std: float
) -> None:
    given = {"resize": resize, "anchor": anchor, "color": color, "mean": (mean, 1.0, 2.0), "std": (std, 3.0, 0.3)}
    preprocess = Preprocessor(InputSpec.model_validate(given), of_size(*size))
    image = noise(*frame)
    passes, _ = preprocess(sparse(image))
    compiled, _ = preprocess(image)
    assert compiled is not passes
    assert np.array_equal(compiled, passes)


@needs_it
@pytest.mark.parametrize("size", [(1080, 1920), (432, 768), (97, 1001)])
def test_frames_of_cameras(size: tuple[int, int]) -> None:
    preprocess = Preprocessor(InputSpec(resize="stretch", scale=1 / 255), of_size(352, 353))
    passes = preprocess(sparse(noise(*size)))[0]
    assert np.array_equal(preprocess(noise(*size))[0], passes)


@needs_it
@pytest.mark.parametrize("region", [np.s_[5:60, 7:90], np.s_[:, 1:], np.s_[::2], np.s_[40:2:-1]], ids=str)
def test_a_region_of_a_frame_whose_rows_lie_farther_apart_than_they_are_long(region: tuple[slice, ...]) -> None:
    preprocess = Preprocessor(InputSpec(resize="stretch"), of_size(31, 33))
    seen = noise(67, 101)[region]
    assert seen.strides[0] != seen.shape[1] * 3
    assert HostPreprocess.takes(preprocess.transform(seen)[0])
    passes = preprocess(sparse(seen))[0]
    assert np.array_equal(preprocess(seen)[0], passes)


@needs_it
@pytest.mark.parametrize("upside_down", [False, True])
@pytest.mark.parametrize("width", [3, 5, 64, 101])
def test_it_reads_no_byte_beside_the_frame(width: int, upside_down: bool) -> None:
    """There are none: the frame begins and ends where memory does, and reading on would be a segmentation fault."""
    height, libc = 7, ctypes.CDLL(None, use_errno=True)
    room = mmap.mmap(-1, 5 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for page in (0, 4):
        assert libc.mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, 0) == 0
    for first in (PAGE, 4 * PAGE - height * width * 3):
        frame = np.ndarray((height, width, 3), np.uint8, room, first)
        frame[:] = noise(height, width)
        seen = frame[::-1] if upside_down else frame
        preprocess = Preprocessor(InputSpec(resize="stretch"), of_size(13, 17))
        assert HostPreprocess.takes(preprocess.transform(seen)[0])
        assert np.array_equal(preprocess(seen)[0], preprocess(sparse(seen))[0])


def test_what_is_of_another_version_or_no_library_is_left_alone(tmp_path: Path) -> None:
    stem = Path(engines.__file__).parent / "_resize"
    assert open_library(stem, "tared_resize_version", -1) is None
    assert open_library(tmp_path / "_resize", "tared_resize_version", 1) is None


def test_what_it_is_not_for_is_refused() -> None:
    transform, _ = Preprocessor(InputSpec(color="gray"), of_size(8, 8, channels=1)).transform(noise(16, 16))
    with pytest.raises(ValueError, match="no compiled pass"):
        HostPreprocess(transform, np.zeros((1, 1, 8, 8), np.float32))
