"""The doctor on machines that lack something."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from doctor_findings import by_name

from agent.doctor.examine import examine, healthy
from engines.errors import EngineError
from engines.registry import open_backend


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else real(name))


@pytest.mark.parametrize(("package", "name"), [("cv2", "opencv"), ("onnxruntime", "onnxruntime")])
def test_a_missing_package_that_is_needed_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    without(monkeypatch, package)
    finding = by_name(examine())[name]
    assert (finding.ok, finding.needed) == (False, True)
    assert "pip install" in finding.remedy
    assert not healthy(examine())


def test_a_missing_package_that_is_merely_useful_leaves_the_machine_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "amqtt", "tensorrt", "pycuda")
    assert healthy(examine())
    assert ".[demo]" in by_name(examine())["amqtt"].remedy


def test_a_full_disk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # as shutil returns it
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40 - 5, 5))
    assert not by_name(examine())["disk free"].ok


def test_a_runtime_that_does_not_import_is_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "engines.onnxruntime_backend", raising=False)
    with pytest.raises(EngineError, match=r"backend\.missing.*pip install onnxruntime"):
        open_backend("onnxruntime")


def test_an_opencv_that_does_not_load_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JetPack's under NumPy 2."""
    (tmp_path / "cv2").mkdir()
    (tmp_path / "cv2" / "__init__.py").write_text("raise ImportError('numpy.core.multiarray failed to import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "cv2" or name.startswith(("cv2.", "agent.camera.opencv"))]:
        monkeypatch.delitem(sys.modules, name)
    found = by_name(examine())
    assert found["opencv"].found.startswith("does not load: ")
    assert found["opencv"].remedy == "pip install opencv-python-headless"
    assert not healthy(examine())


def test_limits_of_the_camera_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.doctor.software.gstreamer_version", lambda: None)
    monkeypatch.setattr("agent.camera.opencv.opencv_version", lambda: "4.8.1")
    found = by_name(examine())
    assert found["gstreamer"].found == "no Python bindings of GStreamer"
    assert "csi: and gst:" in found["gstreamer"].remedy
    assert found["opencv"].found.startswith("4.8.1, which repeats the last picture")
    assert not found["opencv"].needed
    monkeypatch.setattr("agent.doctor.software.gstreamer_version", lambda: "1.20.3")
    monkeypatch.setattr("agent.camera.opencv.opencv_version", lambda: "4.13.0-dev")
    found = by_name(examine())
    assert found["gstreamer"].ok
    assert found["opencv"].ok
