"""Findings of the doctor on a Jetson, on a PC with a GPU, and on a machine without one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from doctor_findings import by_name
from fake_pycuda import ORIN
from fake_tensorrt import FakeTensorRt

from agent.doctor import software as doctor
from agent.doctor.examine import examine
from engines import board
from engines.cuda.gpu import DRIVER


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver library loads, and that has nvcc."""
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **how: None if name == DRIVER else real(name, **how))
    monkeypatch.setattr(doctor, "nvcc_path", lambda: "/usr/local/cuda/bin/nvcc")


@pytest.mark.usefixtures("fake", "driver")
@pytest.mark.parametrize("fake", [ORIN], indirect=True)
def test_a_jetson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path, content in (
        ("_MODEL", "model", "NVIDIA Jetson Orin Nano Developer Kit\0"),
        ("_RELEASE", "nv_tegra_release", "# R36 (release), REVISION: 4.3\nanything else\n"),
        ("_POWER", "status", "pmode:0002\n"),
    ):
        (tmp_path / path).write_text(content)
        monkeypatch.setattr(board, name, tmp_path / path)
    found = by_name(examine())
    assert found["board"].found == "NVIDIA Jetson Orin Nano Developer Kit"
    assert found["tensorrt"].found == "tensorrt 10.3.0"
    assert found["gpu"].found.startswith("Orin, sm 8.7, CUDA ")
    assert found["gpu"].found.endswith("shared memory")
    assert found["backend tensorrt"].found == "ready"
    assert board.board()["power_mode"] == "pmode:0002"
    assert board.board()["l4t"].startswith("# R36")


@pytest.mark.usefixtures("driver")
def test_a_gpu_without_its_tools(fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake.version == "10.3.0"
    monkeypatch.setattr(doctor, "nvcc_path", lambda: None)
    found = by_name(examine())
    assert (found["nvcc"].ok, "nvidia-jetpack" in found["nvcc"].remedy) == (False, True)
    assert found["backend tensorrt"].found == "no nvcc"
