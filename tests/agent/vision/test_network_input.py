"""The network input of a model follows from its tensor and from the spec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.vision.preprocess import NetworkInput, network_input
from agent.vision.spec import ModelSpec
from engines.interface import TensorSpec
from engines.preprocessing import Layout

PROFILE = {"min": [1, 3, 320, 320], "opt": [1, 3, 416, 416], "max": [4, 3, 640, 640]}
NATIVE: dict[str, Any] = {"resize": "native", "multiple": 32}


def spec(profile: dict[str, list[int]] | None = None, name: str = "x", **given: Any) -> ModelSpec:
    profiles = [] if profile is None else [{name: profile}]
    return validate(ModelSpec, {"path": "a.onnx", "task": "classify", "profiles": profiles, "input": given}, "test")


def tensor(*shape: int | None, dtype: type = np.float32) -> TensorSpec:
    return TensorSpec("x", np.dtype(dtype), shape)


def channels_last(profile: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: [shape[0], *shape[2:], shape[1]] for name, shape in profile.items()}


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((1, 3, 32, 48), "NCHW"), ((None, 3, 32, 48), "NCHW"), ((1, 32, 48, 3), "NHWC"), ((None, 32, 48, 3), "NHWC")],
)
def test_the_model_says_layout_and_size(shape: tuple[int | None, ...], layout: Layout) -> None:
    taken = network_input(spec(), tensor(*shape))
    assert taken == NetworkInput(3, (32, 48), (32, 48), (32, 48), layout)
    assert taken.shape((32, 48)) == (1, *shape[1:])
    assert taken.size(taken.shape((5, 7))) == (5, 7)


def test_open_dimensions_are_those_of_the_opt_shape() -> None:
    assert network_input(spec(PROFILE), tensor(None, 3, None, None)).usual_size == (416, 416)
    last = network_input(spec(channels_last(PROFILE)), tensor(None, None, None, 3))
    assert (last.usual_size, last.layout) == ((416, 416), "NHWC")
    assert network_input(spec(channels_last(PROFILE)), tensor(None, None, None, None)) == last


def test_dimensions_that_no_profile_settles_are_refused() -> None:
    with pytest.raises(ConfigError, match="without a profile") as caught:
        network_input(spec(), tensor(None, 3, None, None))
    assert caught.value.code == "model.profile"
    with pytest.raises(ConfigError, match="fixed dimensions"):
        network_input(spec(PROFILE), tensor(None, 3, 320, None))
    with pytest.raises(ConfigError, match="one image input"):
        network_input(spec(), tensor(1, 10))


@pytest.mark.parametrize(("color", "shape"), [("gray", (1, 3, 8, 8)), ("rgb", (1, 8, 8, 1)), ("bgr", (1, 8, 8, 4))])
def test_channels_of_other_colours_are_refused(color: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"for color '{color}'") as caught:
        network_input(spec(color=color), tensor(*shape))
    assert caught.value.code == "model.input"


def test_uint8_is_taken_as_it_is() -> None:
    assert network_input(spec(), tensor(1, 8, 8, 3, dtype=np.uint8)).dtype == "uint8"
    for given in ({"scale": 0.5}, {"mean": [1.0]}, {"std": [2.0]}):
        with pytest.raises(ConfigError, match=f"of type uint8, and input.{next(iter(given))}") as caught:
            network_input(spec(**given), tensor(1, 8, 8, 3, dtype=np.uint8))
        assert caught.value.code == "model.input"
    with pytest.raises(ConfigError, match="of type float64"):
        network_input(spec(), tensor(1, 3, 8, 8, dtype=np.float64))


def test_frames_have_one_size_unless_the_input_follows_them() -> None:
    one = network_input(spec(PROFILE, resize="pad"), tensor(None, 3, None, None))
    assert (one.min_size, one.max_size) == ((416, 416), (416, 416))
    many = network_input(spec(PROFILE, **NATIVE), tensor(None, 3, None, None))
    assert (many.usual_size, many.min_size, many.max_size) == ((416, 416), (320, 320), (640, 640))


@pytest.mark.parametrize("resize", ["native", "nearest", "rect"])
def test_the_input_follows_frames_only_within_a_profile(resize: str) -> None:
    with pytest.raises(ConfigError, match=f"the largest input, for input.resize '{resize}'"):
        spec(resize=resize)
    with pytest.raises(ConfigError, match="without a profile") as caught:
        network_input(spec(PROFILE, name="y", resize=resize), tensor(None, 3, None, None))
    assert caught.value.code == "model.profile"


@pytest.mark.parametrize("shape", [(1, 3, 416, 416), (1, 3, None, 416), (1, 3, 416, None)])
def test_the_input_follows_frames_only_where_height_and_width_are_open(shape: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError, match="a model of open height and width") as caught:
        network_input(spec(PROFILE, **NATIVE), tensor(*shape))
    assert caught.value.code == "model.input"


@pytest.mark.parametrize("last", [False, True])
def test_the_bounds_of_open_sizes_are_multiples_too(last: bool) -> None:
    profile = PROFILE | {"max": [4, 3, 640, 650]}
    profile, shape = (channels_last(profile), (None, None, None, 3)) if last else (profile, (None, 3, None, None))
    with pytest.raises(ConfigError, match="multiples of 32") as caught:
        network_input(spec(profile, **NATIVE), tensor(*shape))
    assert caught.value.code == "model.profile"
