"""Which TensorRT is on this machine, and where the releases differ: the one table, and the one import.

Everything else in this package is written once, against engines/trt/api.py, for every row of the table.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engines.errors import EngineError
from engines.trt.api import TensorRt

Version = tuple[int, ...]


@dataclass(frozen=True)
class ReleaseRange:
    """Releases of one module from `first` up to, but not including, `until`, and what sets them apart.

    crosses: builds for GPUs that this machine does not have. times: has a timing cache, and kernels that INT8 may lack.
    without_dla: the releases [first, until) in which NVIDIA left the deep learning accelerators out.
    """

    module: str
    first: Version
    until: Version
    crosses: bool = False
    times: bool = True
    without_dla: tuple[Version, Version] = ((0,), (0,))

    def __str__(self) -> str:
        shown = f"{self.first[0]}.x" if self.until == (self.first[0] + 1,) else ".".join(map(str, self.first))
        return f"{self.module} {shown}"


RELEASES = (
    ReleaseRange("tensorrt", (10,), (11,), without_dla=((10, 8), (11,))),
    ReleaseRange("tensorrt", (11,), (12,), without_dla=((11,), (11, 4, 1))),
    ReleaseRange("tensorrt_rtx", (1, 7), (1, 8), crosses=True, times=False, without_dla=((1, 7), (1, 8))),
)
"""10.x: JetPack 6 to 7.2. 11.x: JetPack 7.2.2 and later. TensorRT-RTX: GPUs of PCs, and machines without one."""

_INSTALL = "on a Jetson: create the venv with --system-site-packages; on a PC: pip install tensorrt_rtx_cu12==1.7.*"


@dataclass(frozen=True)
class TensorRtRelease:
    """The TensorRT that was found: its module, its version, and its row of the table."""

    trt: TensorRt
    release: ReleaseRange
    version: str

    @property
    def name(self) -> str:
        """Module and version, for people."""
        return f"{self.release.module} {self.version}"

    @property
    def has_dla(self) -> bool:
        """Whether this release can use a deep learning accelerator; a board may still have none."""
        first, until = self.release.without_dla
        return not first <= parse_version(self.version) < until


def open_release(crossing: bool = False) -> TensorRtRelease:
    """Import the TensorRT of this machine; `crossing` asks for one that builds for GPUs which are not here.

    Raises EngineError: `backend.missing` when there is none, `backend.library` when it is there and cannot be loaded,
    `backend.version` when it is none of RELEASES.
    """
    wanted = [release for release in RELEASES if release.crosses or not crossing]
    modules = dict.fromkeys(release.module for release in wanted)
    supported = ", ".join(map(str, wanted))
    found = next((name for name in modules if importlib.util.find_spec(name) is not None), None)
    if found is None:
        raise EngineError("backend.missing", f"no package {' or '.join(modules)}", supported, _INSTALL)
    try:
        trt = cast(TensorRt, importlib.import_module(found))
        version = trt.__version__
    except (ImportError, OSError, AttributeError) as error:  # the bindings' own words when libnvinfer is not there
        remedy = f"install the libraries that belong to the bindings; {_INSTALL}"
        raise EngineError(
            "backend.library", f"{found} cannot be loaded: {error}", "TensorRT's libraries beside its bindings", remedy
        ) from error
    release = find_release(found, version, wanted)
    if release is None:
        remedy = "JetPack 6 or later brings TensorRT 10; JetPack 5 has TensorRT 8, which tared cannot use"
        raise EngineError("backend.version", f"{found} {version}", supported, remedy)
    return TensorRtRelease(trt, release, version)


def find_release(module: str, version: str, releases: Sequence[ReleaseRange] = RELEASES) -> ReleaseRange | None:
    """The row of the table for a version of a module."""
    parsed = parse_version(version)
    return next((r for r in releases if r.module == module and r.first <= parsed < r.until), None)


def parse_version(text: str) -> Version:
    """The leading numbers of a version: "10.3.0.post1" is (10, 3, 0)."""
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", text)[0].split("."))) if text[:1].isdigit() else ()  # type: ignore[index]  # it matches: the text begins with a digit
