"""Find and import the TensorRT of this machine.

RELEASES is the one table of the supported releases and of what sets them apart. All other modules of this package are
written once, against engines/trt/api.py, for every row of the table.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import cast

from engines.errors import EngineError
from engines.trt.api import TensorRt

Version = tuple[int, ...]


@dataclass(frozen=True)
class ReleaseRange:
    """A row of the table: releases of one module in [first, until), and what sets them apart.

    crosses: builds for GPUs that this machine does not have.
    times: has a timing cache, and may lack an INT8 kernel for a layer.
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
    """The TensorRT of this machine: its module, the row of RELEASES that it belongs to, and its version."""

    trt: TensorRt
    traits: ReleaseRange
    version: str

    @property
    def name(self) -> str:
        """Module and version, for people."""
        return f"{self.traits.module} {self.version}"

    @property
    def has_dla(self) -> bool:
        """True if this release can use a deep learning accelerator; a board may still have none."""
        first, until = self.traits.without_dla
        return not first <= parse_version(self.version) < until


def open_release(crossing: bool = False) -> TensorRtRelease:
    """Import the TensorRT of this machine; with `crossing`, one that builds for GPUs that this machine does not have.

    Raises EngineError:
        backend.missing  no package of the table is installed
        backend.library  a package is there and cannot be loaded
        backend.version  its version is in no row of RELEASES
    """
    candidates = [row for row in RELEASES if row.crosses or not crossing]
    modules = dict.fromkeys(row.module for row in candidates)
    supported = ", ".join(map(str, candidates))
    module = next((name for name in modules if importlib.util.find_spec(name) is not None), None)
    if module is None:
        raise EngineError("backend.missing", f"no package {' or '.join(modules)}", supported, _INSTALL)
    try:
        trt = cast(TensorRt, importlib.import_module(module))
        version = trt.__version__
    except (ImportError, OSError, AttributeError) as error:  # raised by the bindings where libnvinfer is missing
        remedy = f"install the libraries that belong to the bindings; {_INSTALL}"
        raise EngineError(
            "backend.library", f"{module} cannot be loaded: {error}", "TensorRT's libraries beside its bindings", remedy
        ) from error
    parsed = parse_version(version)
    rows = (row for row in candidates if row.module == module and row.first <= parsed < row.until)
    traits = next(rows, None)
    if traits is None:
        remedy = "JetPack 6 or later brings TensorRT 10; JetPack 5 has TensorRT 8, which tared cannot use"
        raise EngineError("backend.version", f"{module} {version}", supported, remedy)
    return TensorRtRelease(trt, traits, version)


def parse_version(text: str) -> Version:
    """Return the leading numbers of a version: (10, 3, 0) for "10.3.0.post1"; empty if it begins with none."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
