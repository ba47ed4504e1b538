"""`tared run --web`: the page beside the daemon says where it is, shows the board, and ends with the daemon."""

from __future__ import annotations

import errno
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from brokers import RealBroker, eventually
from preview_bench import brightness
from warm_start import TalkingProcess
from worlds import World, make_world

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def world_of(folder: Path, broker: RealBroker | None) -> World:
    """It plays its clip again and again: the page may take as long as it likes."""
    mqtt = {"device": "gate", "telemetry_period_s": 0.2, "outbox": {"commit_s": 0.2}}
    address = {"host": broker.host, "port": broker.port} if broker is not None else {}
    preview, privacy = {"address": "127.0.0.1:0"}, {"preview": True}
    more = {"camera": {"loop": True}, "preview": preview, "privacy": privacy}
    return make_world(folder, lambda _: 0.5, 60.0, mqtt={**mqtt, **address}, **more)


def printed_address(lines: Iterator[str]) -> str:
    for line in lines:
        if found := re.search(r"watch it in a browser: (http://127\.0\.0\.1:\d+)$", line.strip()):
            return found[1]
        assert "no page" not in line
    raise AssertionError("nobody said where to look")


def text_at(url: str) -> str:
    try:
        with urlopen(url, timeout=10.0) as answer:
            return str(answer.read().decode())
    except OSError:  # 404 of a board that has not reported yet
        return ""


def is_gone(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == errno.ECONNREFUSED


@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.trial), signal.SIGKILL])
def test_a_page_beside_the_daemon_shows_the_board_and_ends_with_it(
    tmp_path: Path, any_broker: RealBroker, end: signal.Signals
) -> None:
    world = world_of(tmp_path, any_broker)
    with TalkingProcess(world.arguments("--web", "127.0.0.1:0")) as process:
        try:
            url = printed_address(iter(process.stderr))
            eventually(lambda: ">gate</a>" in text_at(url), 60.0)
            eventually(lambda: "data-cameras='[[" in text_at(f"{url}/boards/gate"), 60.0)
            page = r"float, FP32|INT8, [\d.]+ %"  # before the first job has ended, and after it
            eventually(lambda: re.search(page, text_at(f"{url}/boards/gate")) is not None, 60.0)
            with urlopen(f"{url}/boards/gate/live.jpg", timeout=10.0) as answer:
                assert 60.0 < brightness(answer.read()) < 200.0
            process.send_signal(end)
            process.communicate(timeout=60.0)
            assert process.returncode == (0 if end == signal.SIGTERM else -end)
            eventually(lambda: is_gone(url), 60.0)
        finally:
            process.kill()


def test_a_recording_is_served_where_no_page_can_be(tmp_path: Path, any_broker: RealBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        summary, said = world_of(tmp_path, any_broker).run("--web", address, until="no page")
    assert summary["frames"] > 0
    (line,) = [line for line in said.splitlines() if "no page" in line]
    assert line.startswith(f"no page for a browser: web.listen: {address}: Address already in use")
