"""The fake TensorRT's builder: each of its rules broken on purpose."""

from __future__ import annotations

import importlib.util
import typing
from collections.abc import Callable
from typing import Any

import pytest
from fake_tensorrt import FakeTensorRt, install
from trt_flow import Flow, dynamic_net, float_net, int8_net
from zoo import Net

from engines.trt import api
from engines.trt.dialect import open_dialect

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> Flow:
    return Flow(install(monkeypatch))


@pytest.mark.parametrize(
    ("version", "module"), [("10.3.0", "tensorrt"), ("11.4.0.106", "tensorrt"), ("1.7.1.116", "tensorrt_rtx")]
)
def test_it_is_found_as_a_release_of_its_own(monkeypatch: pytest.MonkeyPatch, version: str, module: str) -> None:
    fake = install(monkeypatch, version, module)
    dialect = open_dialect()
    assert (dialect.trt, dialect.name) == (fake.module, f"{module} {version}")
    if module == "tensorrt":
        with pytest.raises(ValueError, match="__spec__"):
            importlib.util.find_spec("tensorrt_rtx")


@pytest.mark.parametrize("module", ["tensorrt", "tensorrt_rtx"])
def test_it_has_every_member_that_the_code_may_use(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    flow = Flow(install(monkeypatch, "1.7.1" if module == "tensorrt_rtx" else "10.3.0", module))
    flow.load(flow.build(dynamic_net(), profiles=[SMALL_TO_LARGE]))
    things = {type(thing).__name__: thing for thing in flow.things()}
    protocols = {name: kind for name, kind in vars(api).items() if typing.is_typeddict(kind) or is_protocol(kind)}
    protocols["TensorRt"], protocols["CrossConfig"] = api.CrossTensorRt, api.CrossConfig
    lacking = []
    for name, kind in protocols.items():
        if module == "tensorrt" and name in ("ComputeCapability", "CrossTensorRt", "CrossConfig"):
            continue
        home = {"TensorRt": flow.trt, "CrossTensorRt": flow.trt, "CrossConfig": things["IBuilderConfig"]}
        thing = home.get(name) or things.get(name) or getattr(flow.trt, name, None)
        lacking += [f"{name}.{member}" for member in members(kind, module) if not hasattr(thing, member)]
    assert lacking == []
    flow.close()


def is_protocol(kind: object) -> bool:
    return isinstance(kind, type) and getattr(kind, "_is_protocol", False) and kind is not typing.Protocol
