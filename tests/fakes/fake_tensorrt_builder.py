"""The fake's builder: checks networks and profiles as TensorRT does, and writes a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fake_tensorrt_config import CrossBuilderConfig, IBuilderConfig, IOptimizationProfile, Shape
from fake_tensorrt_layers import Row, listing
from fake_tensorrt_network import INetworkDefinition
from fake_tensorrt_plan import Plan, input_shapes
from fake_tensorrt_progress import BuildCanceled, Progress
from fake_tensorrt_types import DeviceType, IHostMemory

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt

_USAGE = "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error ({})"


class Builder:
    def __init__(self, world: FakeTensorRt, logger: Any) -> None:
        world.register(logger, "Builder")
        self._world = world

    @property
    def num_DLA_cores(self) -> int:
        return self._world.dla_cores

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(self._world, flags)

    def create_builder_config(self) -> IBuilderConfig:
        return (CrossBuilderConfig if self._world.is_cross else IBuilderConfig)(self._world)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        """The plan; None, and an error in the log, for whatever it cannot build."""
        world = self._world
        network.check_parser()
        wrong = _misuse(world, network, config)
        if wrong:
            world.error(wrong)
            return None
        rows = listing(network.model, {*network.debug, *network.outputs}, world.without_int8)
        try:
            with Progress(config.progress_monitor).phases():
                time.sleep(world.build_s)
                broken = _no_kernel(world, network, rows)
        except BuildCanceled:
            world.error("IBuilder::buildSerializedNetwork: Error Code 7: BuildCanceled (Build canceled by user)")
            return None
        if world.fails("build"):
            return None
        if broken:
            world.error(broken)
            return None
        cache = config.get_timing_cache()
        world.timed = [row.name for row in rows if cache is None or row.key not in cache.entries]
        if cache is not None:
            cache.entries = list(dict.fromkeys([*cache.entries, *(row.key for row in rows)]))
        return IHostMemory(Plan.of(world, network, config).to_bytes())


def _misuse(world: FakeTensorRt, network: INetworkDefinition, config: IBuilderConfig) -> str:
    """Return the faults of a network and its profiles, in TensorRT-RTX's words; empty if there are none."""
    if network.num_layers == 0:
        return _USAGE.format("Network must have at least one output.")
    if config.default_device_type is DeviceType.DLA and not 0 <= config.DLA_core < world.dla_cores:
        return _USAGE.format(f"DLA core {config.DLA_core} of {world.dla_cores}.")
    inputs = input_shapes(network.model)
    dynamic = {name for name, shape in inputs.items() if -1 in shape}
    if dynamic and not config.profiles:
        return _USAGE.format("Network has dynamic or shape inputs, but no optimization profile has been defined.")
    for index, profile in enumerate(config.profiles):
        for name in dynamic - profile.shapes.keys():
            return _USAGE.format(f"Dynamic input tensor {name} is missing dimensions in profile {index}.")
        for name in profile.shapes.keys() & inputs.keys():
            wrong = _wrong_shape(name, inputs[name], index, profile.shapes[name])
            if wrong:
                return _USAGE.format(wrong)
    return ""


def _wrong_shape(name: str, shape: Shape, index: int, profile: tuple[Shape, Shape, Shape]) -> str:
    if len(profile[0]) != len(shape):
        return (
            f"Dynamic-shaped input tensor {name} has {len(shape)} dimensions but profile {index} has {len(profile[0])}"
        )
    for axis, (size, *bounds) in enumerate(zip(shape, *profile, strict=True)):
        if size >= 0 and set(bounds) != {size}:
            return f"Dimension mismatch for tensor {name} and profile {index}. At dimension axis {axis}, {bounds}"
    return ""


def _no_kernel(world: FakeTensorRt, network: INetworkDefinition, rows: Sequence[Row]) -> str:
    marked = [name for name in network.debug if name in network.input_names()]
    if marked:
        return (
            "[tacticSupply.cpp::getSupportedFormats::48] Error Code 2: Internal Error (Assertion !layerImpls.empty() "
            f"failed. debug output for {marked[0]} has no runners that implement it)"
        )
    lacking = [row for row in rows if row.is_int8 and world.without_kernel & set(row.nodes)]
    if lacking:
        return f"Error Code 10: Internal Error (Could not find any implementation for node {lacking[0].name}.)"
    return ""
