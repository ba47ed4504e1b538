"""Readings of boards of four kinds, from files like theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from boards import AGX_XAVIER, LAPTOP, NANO, ORIN_NANO, lay_down

from agent.system.board import BoardReading, BoardState, Rail, Zone, health


def _read(root: Path) -> BoardReading:
    reading = BoardState(root).read()
    assert reading.memory_available_bytes is not None
    assert 0 < reading.memory_available_bytes <= psutil.virtual_memory().total
    return replace(reading, memory_available_bytes=0)


def test_an_orin_nano(tmp_path: Path) -> None:
    reading = _read(lay_down(ORIN_NANO, tmp_path))
    assert reading == BoardReading(
        memory_available_bytes=0,
        is_jetson=True,
        zones=(Zone("cpu-thermal", 51.562, 99.0), Zone("tj-thermal", 52.0, None)),
        throttling=(),  # neither the fan, nor the warm surface, nor the power mode's frequency
        over_current_events=3,
        rails=(Rail("VDD_CPU_GPU_CV", 1.0128, 200 / 32760), Rail("VDD_IN", 5.072, 0.25)),
        power_mode="MAXN_SUPER",
    )
    assert reading.power_w == 5.072


def test_an_agx_xavier_measures_no_input_rail(tmp_path: Path) -> None:
    reading = _read(lay_down(AGX_XAVIER, tmp_path))
    assert reading == BoardReading(
        memory_available_bytes=0,
        is_jetson=True,
        zones=(Zone("GPU-therm", 44.5, None),),
        throttling=("thermal-cpufreq-0",),
        rails=(Rail("CPU", 0.95, None), Rail("GPU", 1.9, 0.01)),
        power_mode="3",
    )
    assert reading.power_w == pytest.approx(2.85)


def test_an_old_nano(tmp_path: Path) -> None:
    reading = _read(lay_down(NANO, tmp_path))
    assert reading == BoardReading(
        memory_available_bytes=0,
        is_jetson=True,
        zones=(Zone("AO-therm", 39.5, None),),
        throttling=(),
        rails=(Rail("POM_5V_GPU", 0.5, None), Rail("POM_5V_IN", 2.5, 0.25)),
        power_mode="0",
    )
    assert reading.power_w == 2.5


@pytest.mark.parametrize(
    ("model", "jetson"), [("NVIDIA Jetson Orin NX Developer Kit\0", True), ("Raspberry Pi 5 Model B\0", False)]
)
def test_a_jetson_is_known_by_its_device_tree(tmp_path: Path, model: str, jetson: bool) -> None:
    assert _read(lay_down({"proc/device-tree/model": model}, tmp_path)).is_jetson is jetson


def test_a_laptop(tmp_path: Path) -> None:
    reading = _read(lay_down(LAPTOP, tmp_path))
    assert reading == BoardReading(memory_available_bytes=0, zones=(Zone("x86_pkg_temp", 47.0, None),))
    assert reading.power_w is None


@pytest.mark.parametrize("spoilt", ["", "nonsense", "\udcff"])
@pytest.mark.parametrize("tree", [ORIN_NANO, AGX_XAVIER, NANO, LAPTOP])
def test_files_that_say_something_else(tmp_path: Path, tree: dict[str, str], spoilt: str) -> None:
    for name in tree:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(spoilt.encode(errors="surrogateescape"))
    assert _read(tmp_path) == BoardReading(memory_available_bytes=0)


@pytest.mark.parametrize("name", list(ORIN_NANO))
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """As a sensor that is switched off: here a folder, which no read survives either."""
    without = lay_down({other: text for other, text in ORIN_NANO.items() if other != name}, tmp_path / "without")
    folder = lay_down(ORIN_NANO, tmp_path / "folder")
    (folder / name).unlink()
    (folder / name).mkdir()
    assert _read(folder) == _read(without)


def test_health_has_the_sensors_that_there_are(tmp_path: Path) -> None:
    jetson = health(BoardState(lay_down(ORIN_NANO, tmp_path / "orin")))
    assert (jetson["power_mode"], jetson["power_w"], jetson["throttling"]) == ("MAXN_SUPER", 5.072, False)
    assert {"rss_bytes", "memory_available_bytes", "load_1min"} <= set(jetson)
    assert health(BoardState(lay_down(AGX_XAVIER, tmp_path / "xavier")))["throttling"] is True
    assert not {"power_mode", "power_w", "throttling"} & set(health(BoardState(tmp_path)))
    assert float(health()["memory_available_bytes"]) > 0.0
