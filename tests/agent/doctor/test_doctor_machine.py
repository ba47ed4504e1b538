"""The doctor on boards that cannot be here, by what their file systems say, and on cameras and brokers that can."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from boards import AGX_XAVIER, LAPTOP, ORIN_NANO, lay_down
from brokers import free_port
from doctor_findings import by_name, configured
from mjpeg_server import MjpegServer
from worlds import SPEC

from agent.common.schema import validate
from agent.config import Config, load_config
from agent.doctor import configured as configured_doctor
from agent.doctor import machine
from agent.doctor.configured import examine_configured, examine_unconfigured
from agent.doctor.examine import Finding, examine, healthy
from agent.doctor.machine import examine_machine
from agent.doctor.software import _driver
from fleet.cli.main import main

DPKG = """Package: nvidia-jetpack-dev
Status: install ok installed
Version: 1.0

Package: nvidia-jetpack
Status: {status}
Priority: standard
Version: 6.2.1+b38

"""
JETPACK_6 = {
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.4, GCID: 1, BOARD: generic\n# and more\n",
    "var/lib/dpkg/status": DPKG.format(status="install ok installed"),
    "sys/devices/system/cpu/cpufreq/policy0/scaling_min_freq": "729600",
    "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq": "1510400",
}


def on(root: Path, *trees: dict[str, str]) -> dict[str, Finding]:
    for tree in trees:
        lay_down(tree, root)
    return by_name(examine_machine(root, None))


def test_an_orin_with_jetpack_6(tmp_path: Path) -> None:
    found = on(tmp_path, ORIN_NANO, JETPACK_6)
    assert found["system"].found == "Ubuntu 22.04.5 LTS"
    assert found["jetpack"] == Finding("jetpack", "6.2.1+b38, L4T 36.4.4", True, False)
    assert found["power mode"].found == "MAXN_SUPER, clocks by load"
    assert found["headroom"].ok


def test_jetson_clocks_leave_no_clock_room(tmp_path: Path) -> None:
    fixed = {"sys/devices/system/cpu/cpufreq/policy0/scaling_min_freq": "1510400"}
    assert on(tmp_path, ORIN_NANO, JETPACK_6, fixed)["power mode"].found == "MAXN_SUPER, clocks fixed (jetson_clocks)"


@pytest.mark.parametrize(
    ("tree", "found", "remedy"),
    [
        ({"var/lib/dpkg/status": DPKG.format(status="deinstall ok config-files")}, "without", "install nvidia-jetpack"),
        ({"etc/nv_tegra_release": "# R35 (release), REVISION: 6.0, GCID: 1"}, "L4T 35.6.0", "flash JetPack 6"),
    ],
)  # fmt: skip
def test_an_old_or_bare_jetpack_is_named_with_its_remedy(
    tmp_path: Path, tree: dict[str, str], found: str, remedy: str
) -> None:
    jetpack = on(tmp_path, ORIN_NANO, JETPACK_6, tree)["jetpack"]
    assert not jetpack.ok
    assert found in jetpack.found
    assert remedy in jetpack.remedy


def test_a_board_that_throttles_has_no_headroom(tmp_path: Path) -> None:
    found = on(tmp_path, AGX_XAVIER)["headroom"]
    assert (found.ok, found.needed, found.found) == (False, False, "throttled by thermal-cpufreq-0")


def test_a_clock_that_follows_no_time_server_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_synchronised in (False, True):
        monkeypatch.setattr(machine, "is_synchronised", lambda is_synchronised=is_synchronised: is_synchronised)
        clock = on(tmp_path, LAPTOP)["clock"]
        assert (clock.ok, "set-ntp true" in clock.remedy) == (is_synchronised, not is_synchronised)


def test_a_laptop_is_no_jetson(tmp_path: Path) -> None:
    assert not {"jetpack", "power mode"} & on(tmp_path, LAPTOP).keys()


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ({"sys/module/nvidia/version": "580.65.06"}, "nvidia 580.65.06"),
        ({"sys/module/nvgpu/refcnt": "3"}, "nvgpu"),
    ],
)
def test_the_kernels_driver(tmp_path: Path, tree: dict[str, str], found: str) -> None:
    assert not _driver(tmp_path).ok
    assert _driver(lay_down(tree, tmp_path)).found == found


def around(path: Path) -> dict[str, Finding]:
    return by_name(examine_configured(load_config(path)))


def broker_of(**mqtt: Any) -> Finding:
    """Examine the broker alone, without a camera."""
    content = {"model": SPEC, "camera": {"source": "clip.avi"}, "mqtt": mqtt}
    return configured_doctor._broker(validate(Config, content, "test"), False)


def test_the_cameras_first_frame_is_read(tmp_path: Path) -> None:
    found = around(configured(tmp_path))["camera"]
    assert found.ok
    assert "clip.avi: 32 x 32 in " in found.found


def test_the_camera_is_looked_at_as_it_is_configured(tmp_path: Path) -> None:
    refused = around(configured(tmp_path, camera={"source": "clip.avi", "width": 640, "height": 480}))["camera"]
    assert refused.found == f"camera.width: 640 for a source of kind video, {tmp_path / 'clip.avi'}"
    with MjpegServer() as server:
        server.accepts = lambda _: False
        address = server.url.replace("//", "//admin:secret@")
        found = around(configured(tmp_path, camera={"source": address, "transport": "tcp"}))["camera"]
    assert "answers 401" in found.found
    assert "secret" not in found.found


@contextmanager
def silent_server() -> Iterator[int]:
    """Accepts every connection, and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with suppress(OSError):  # shut down
                while True:
                    taken.append(server.accept()[0])

        thread = threading.Thread(target=take)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in taken:
            each.close()


@pytest.mark.slow
def test_a_silent_stream_is_given_up_and_its_password_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured_doctor, "_FRAME_S", 2.0)
    with silent_server() as port:
        source = f"rtsp://user:secret@127.0.0.1:{port}/stream"
        found = around(configured(tmp_path, camera={"source": source}))["camera"]
    assert (found.ok, found.needed) == (False, True)
    assert "no frame within 2 s" in found.found
    assert "secret" not in found.found


def test_a_missing_broker_and_a_silent_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured_doctor, "_BROKER_S", 2.0)
    gone = broker_of(host="127.0.0.1", port=free_port())
    assert (gone.ok, gone.needed) == (False, True)
    assert "Connection refused" in gone.found
    with silent_server() as port:
        mute = broker_of(host="127.0.0.1", port=port)
    assert mute.found.endswith("no answer to CONNECT")


def test_without_a_configuration_the_cameras_are_listed(tmp_path: Path) -> None:
    assert by_name(examine_unconfigured(tmp_path))["cameras"].found == "none"
    lay_down({"dev/video0": "", "dev/video1": "", "tmp/argus_socket": ""}, tmp_path)
    (cameras,) = examine_unconfigured(tmp_path)
    assert cameras.found == "v4l2:/dev/video0, v4l2:/dev/video1, csi: through nvargus-daemon"


def test_a_state_directory_on_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(configured(tmp_path))
    state = by_name(examine_machine(tmp_path, config))["state directory"]
    assert state.ok
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:8], os.ST_RDONLY, real[9])))
    state = by_name(examine_machine(tmp_path, config))["state directory"]
    assert (state.ok, state.needed) == (False, True)
    assert "read-only" in state.found


def test_a_configuration_with_errors_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = configured(tmp_path, threads="many")
    assert main(["doctor", "-c", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (finding,) = [each for each in document["findings"] if each["name"] == "configuration"]
    assert "threads: expected integer" in finding["found"]
    assert not finding["ok"]


def test_a_missing_camera_and_a_configured_backend_are_findings_among_others(tmp_path: Path) -> None:
    findings = examine(configured(tmp_path, camera={"source": "v4l2:/dev/video99"}, backend="tensorrt"))
    found = by_name(findings)
    missing = Finding("camera", "no /dev/video99", False, True, "check the path or address of the source")
    assert found["camera"] == missing
    assert found["backend tensorrt"].needed
    assert "service" in found
    assert not healthy(findings)
