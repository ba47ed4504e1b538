"""Every way of preprocessing against its plainest form, to the last bit; and what it costs in memory: nothing."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_inputs import noise, of_size
from plain_preprocess import inner_size, network_input_of, right_sizes

from agent.vision.boxes import Size
from agent.vision.preprocess import NetworkInput, Preprocessor
from agent.vision.spec import InputSpec, Resize
from engines.preprocessing import Layout, PixelType

FIXED = ["letterbox", "stretch", "pad"]
FOLLOWING = ["native", "nearest", "rect"]
ANCHORS = ["top-left", "center"]
COLORS = ["bgr", "rgb", "gray"]
LAYOUTS: list[Layout] = ["NCHW", "NHWC"]
FRAMES = [(1, 1), (2, 3), (7, 40), (33, 9), (16, 24), (17, 23), (24, 16), (45, 70), (90, 31)]
SIDES = st.integers(1, 70)


def given_spec(color: str, dtype: PixelType, **given: object) -> InputSpec:
    mean, std = ((123.7,), (58.4,)) if color == "gray" else ((123.7, 116.3, 103.5), (58.4, -57.1, 57.4))
    scaled = {} if dtype == "uint8" else {"scale": 0.7, "mean": mean, "std": std}
    return InputSpec.model_validate({"color": color, "pad": 93, **scaled, **given})


def check(spec: InputSpec, taken: NetworkInput, preprocess: Preprocessor, frame_size: Size) -> None:
    frame = noise(*frame_size)
    tensor, geometry = preprocess(frame)
    size = taken.size(tensor.shape)
    assert all(side in right for side, right in zip(size, right_sizes(spec, taken, frame_size), strict=True))
    expected = network_input_of(spec, taken, frame, size)
    assert (tensor.dtype, tensor.shape) == (np.dtype(taken.dtype), expected.shape)
    assert np.array_equal(tensor, expected)
    inner = inner_size(spec, taken, frame_size, size)
    assert (geometry.scale_y, geometry.scale_x) == (inner[0] / frame_size[0], inner[1] / frame_size[1])
    corner = [(whole - part) // 2 if spec.anchor == "center" else 0 for whole, part in zip(size, inner, strict=True)]
    assert [geometry.top_px, geometry.left_px] == corner
    assert preprocess.part_of(tensor) == geometry.part(size)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize(
    ("resize", "anchor", "color", "layout"), [*itertools.product(FIXED + FOLLOWING, ANCHORS, COLORS, LAYOUTS)]
)
def test_every_combination(resize: str, anchor: str, color: str, layout: Layout, dtype: PixelType) -> None:
    """Frames of sizes that take turns: smaller than the input, larger, of its size, odd, of a single pixel."""
    spec = given_spec(color, dtype, resize=resize, anchor=anchor, multiple=8 if resize in FOLLOWING else 1)
    taken = of_size(24, 32, spec.channels, layout, dtype)
    if spec.follows_frames:
        taken = NetworkInput(spec.channels, (24, 32), (16, 16), (40, 48), layout, dtype)
    preprocess = Preprocessor(spec, taken)
    for frame_size in (*FRAMES, *FRAMES[::3]):
        check(spec, taken, preprocess, frame_size)


@settings(max_examples=100)
@given(
    frame=st.tuples(SIDES, SIDES),
    bounds=st.tuples(*[st.lists(st.integers(1, 9), min_size=3, max_size=3).map(sorted)] * 2),
    multiple=st.sampled_from([1, 3, 8]),
    resize=st.sampled_from(FOLLOWING),
    anchor=st.sampled_from(ANCHORS),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(["float32", "uint8"]),
)
def test_an_input_that_follows_the_frame(
    frame: Size, bounds: tuple[list[int], list[int]], multiple: int, resize: str, anchor: str, layout: Layout,
    dtype: PixelType,
) -> None:  # fmt: skip
    least, usual, most = ((rows * multiple, columns * multiple) for rows, columns in zip(*bounds, strict=True))
    spec = given_spec("bgr", dtype, resize=resize, anchor=anchor, multiple=multiple)
    taken = NetworkInput(3, usual, least, most, layout, dtype)
    check(spec, taken, Preprocessor(spec, taken), frame)


@pytest.mark.parametrize(
    ("resize", "frame", "size", "inner"),
    [
        ("native", (432, 768), (448, 640), (432, 768)),  # as it is, cut off at the largest
        ("nearest", (430, 500), (416, 512), (416, 512)),  # a few pixels' stretch
        ("nearest", (1080, 1920), (352, 640), (352, 640)),  # shrunk as a whole, then to the next multiple
        ("nearest", (90, 120), (160, 224), (160, 224)),  # grown as a whole
        ("rect", (432, 768), (256, 416), (234, 416)),  # not the 416 rows of a letterbox
        ("rect", (50, 500), (160, 416), (42, 416)),  # never less than the profile has
    ],
)
def test_the_input_has_the_chosen_size(resize: Resize, frame: Size, size: Size, inner: Size) -> None:
    spec = InputSpec(resize=resize, multiple=32)
    taken = NetworkInput(3, (416, 416), (160, 160), (640, 640))
    transform, _ = Preprocessor(spec, taken).transform(np.zeros((*frame, 3), np.uint8))
    assert (transform.height, transform.width) == size
    assert (transform.inner_height, transform.inner_width) == inner


@pytest.mark.parametrize("resize", FIXED + FOLLOWING)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("color", "dtype"), [("rgb", "float32"), ("bgr", "uint8"), ("gray", "float32")])
def test_nothing_is_allocated_for_a_frame(resize: str, layout: Layout, color: str, dtype: PixelType) -> None:
    """Beyond the small objects of a call; a row of the smallest picture here has more bytes.

    All threads are counted, and that of pytest-xdist takes in the next tests meanwhile: once, and not at every try.
    """
    spec = given_spec(color, dtype, resize=resize)
    preprocess = Preprocessor(spec, of_size(96, 2048, spec.channels, layout, dtype))
    frames = [noise(90, 1900), noise(80, 2000)]  # two cameras that take turns
    for frame in frames * 2:
        preprocess(frame)
    tries = []
    for _ in range(3):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for frame in frames * 8:
                preprocess(frame)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        tries.append((peak - before, after - before))
    assert any(most < 2000 and left < 1000 for most, left in tries), tries
