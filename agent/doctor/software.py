"""What tared itself is made of: Python, its packages, OpenCV."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from contextlib import suppress

from agent.doctor.finding import Finding
from calibrate.collect import COMPILED
from engines.host_preprocessing import is_compiled

_FOLLOWS_SIZES = (4, 13)  # measured: 4.8, 4.10 and 4.12 do not, 4.13 and 5.0 do


def examine_software() -> list[Finding]:
    """Look at what is installed in this environment."""
    return [
        _python(),
        package("onnxruntime", needed=True, remedy="pip install onnxruntime"),
        _pass("histograms", COMPILED, "calibration and observing"),
        _pass("preprocessing", is_compiled(), "frames that no GPU makes ready"),
        _opencv(),
        _gstreamer(),
        package("amqtt", needed=False, remedy="pip install 'tared[demo]', or name your broker as mqtt.host"),
    ]


def package(name: str, *, needed: bool, remedy: str) -> Finding:
    """Whether a package is there, and which release."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, "not installed", False, needed, remedy)
    try:
        return Finding(name, importlib.metadata.version(name), True, needed)
    except importlib.metadata.PackageNotFoundError:  # JetPack installs modules without metadata
        return Finding(name, "installed", True, needed)


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", version, sys.version_info >= (3, 10), True, "install Python 3.10 or later")


def _pass(name: str, compiled: bool, slower: str) -> Finding:
    remedy = f"install a C compiler and tared again; until then {slower} cost more time"
    found = "compiled" if compiled else "in Python: the same bits, slower"
    return Finding(name, found, compiled, False, remedy)


def _opencv() -> Finding:
    remedy = "pip install opencv-python-headless; on a Jetson: create the venv with --system-site-packages"
    if importlib.util.find_spec("cv2") is None:
        return Finding("opencv", "not installed", False, True, remedy)
    try:
        from agent.opening import opencv_version
    except ImportError as error:  # JetPack's was built for NumPy 1
        remedy = "on a Jetson: pip install 'numpy<2' 'ml-dtypes<0.6'; elsewhere pip install opencv-python-headless"
        return Finding("opencv", f"does not load: {error}".partition("\n")[0], False, True, remedy)
    version = opencv_version()
    if tuple(int(part) for part in version.split(".")[:2]) < _FOLLOWS_SIZES:
        found = f"{version}, which repeats the last picture where a stream's or a file's size changes"
        remedy = "let cameras keep one size: their picture counts as frozen, and they are opened again; files go wrong"
        return Finding("opencv", found, False, False, remedy)
    return Finding("opencv", version, True, True)


def _gstreamer() -> Finding:
    built_in = False
    with suppress(ImportError):  # which `_opencv` has told
        from agent.opening import has_gstreamer

        built_in = has_gstreamer()
    if built_in:
        return Finding("opencv gstreamer", "yes", True, False)
    remedy = "sources csi: and gst: need JetPack's own OpenCV; files, v4l2, rtsp and http work without"
    return Finding("opencv gstreamer", "no, as in every OpenCV from PyPI", False, False, remedy)
