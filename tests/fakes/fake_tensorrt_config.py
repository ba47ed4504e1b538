"""The fake's builder configuration, optimization profiles and timing cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fake_tensorrt_types import (
    BuilderFlag,
    ComputeCapability,
    DeviceType,
    IHostMemory,
    IProgressMonitor,
    MemoryPoolType,
    ProfilingVerbosity,
    Severity,
)

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt

Shape = tuple[int, ...]
_CACHE_MAGIC = b"ptrtcache"


class IOptimizationProfile:
    __slots__ = ("shapes",)

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Shape, Shape, Shape]] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        self.shapes[input] = tuple(min), tuple(opt), tuple(max)


class ITimingCache:
    """entries: the layers that were timed. home: release and GPU that the timings are of."""

    __slots__ = ("entries", "home")

    def __init__(self, home: list[str], entries: Sequence[str] = ()) -> None:
        self.home, self.entries = home, list(entries)

    def serialize(self) -> IHostMemory:
        return IHostMemory(_CACHE_MAGIC + json.dumps([self.home, self.entries]).encode())


class IBuilderConfig:
    """Other attributes than the bindings' own cannot be set, as with them."""

    __slots__ = (
        *("DLA_core", "_cache", "_monitor", "_world", "avg_timing_iterations", "builder_optimization_level"),
        *("default_device_type", "flags", "limits", "profiles"),
        "profiling_verbosity",
    )

    def __init__(self, world: FakeTensorRt) -> None:
        self._world = world
        self._monitor: IProgressMonitor | None = None
        self._cache: ITimingCache | None = None
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.builder_optimization_level, self.avg_timing_iterations = 3, 1
        self.default_device_type, self.DLA_core = DeviceType.GPU, -1
        self.flags = {BuilderFlag.TF32}
        self.limits: dict[MemoryPoolType, int] = {}
        self.profiles: list[IOptimizationProfile] = []

    @property
    def progress_monitor(self) -> IProgressMonitor | None:
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, monitor: IProgressMonitor) -> None:
        if not isinstance(monitor, IProgressMonitor):
            raise TypeError(f"incompatible function arguments: {monitor!r}")
        self._monitor = monitor

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(BuilderFlag(flag))

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        if not isinstance(pool_size, int) or pool_size < 0:
            raise TypeError(f"set_memory_pool_limit(): incompatible function arguments: {pool_size!r}")
        self.limits[MemoryPoolType(pool)] = pool_size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        """Its index; -1 for one that is not valid."""
        for name, (low, opt, high) in profile.shapes.items():
            ranks = {len(low), len(opt), len(high)}
            if len(ranks) > 1 or not all(a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
                self._world.error(
                    "IOptimizationProfile::isValid: Error Code 4: API Usage Error (Invalid optimization profiles for "
                    f"input tensors {name}, please ensure that the optimization profiles satisfy MIN<=OPT<=MAX.)"
                )
                return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        """An empty cache, and a warning, for what is none."""
        content = bytes(serialized_timing_cache)
        if not content:
            return ITimingCache(_home(self._world))
        try:
            home, entries = json.loads(content.removeprefix(_CACHE_MAGIC))
            return ITimingCache(home, entries)
        except ValueError:
            self._world.log(Severity.WARNING, "Failed to deserialize timing cache. Returning an empty timing cache.")
            return ITimingCache(_home(self._world))

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache.home != _home(self._world) and not ignore_mismatch:
            self._world.error("IBuilderConfig::setTimingCache: Error Code 3: API Usage Error (Cache header mismatch.)")
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache


class CrossBuilderConfig(IBuilderConfig):
    """IBuilderConfig of TensorRT-RTX. capabilities: what to build for, none being the GPU that is here."""

    __slots__ = ("capabilities", "num_compute_capabilities")

    def __init__(self, world: FakeTensorRt) -> None:
        super().__init__(world)
        self.num_compute_capabilities = 0
        self.capabilities: dict[int, ComputeCapability] = {}

    def set_compute_capability(self, capability: ComputeCapability, index: int) -> bool:
        if not 0 <= index < self.num_compute_capabilities:
            return False
        self.capabilities[index] = ComputeCapability(capability)
        return True


def _home(world: FakeTensorRt) -> list[str]:
    return [world.name, world.version, world.pycuda.device.name()]
