"""The live picture on a board's page: of boards of this machine alone, while somebody looks; else why there is none."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import RealBroker, eventually, free_port
from preview_bench import Cameras, brightness, preview_config, previewed
from web_bench import BOOT_ID, Board, Site, serving

from agent.mqtt.config import MqttConfig

GREY = np.full((90, 120, 3), 160, np.uint8)
LIVE = "/boards/gate/live.jpg"


@contextlib.contextmanager
def showing(address: str, names: tuple[str, ...] = ("yard",), device: str = "gate") -> Iterator[Any]:
    """The preview of a board, whose cameras deliver grey frames."""
    config = preview_config(address, names).model_copy(update={"mqtt": MqttConfig(fleet="f", device=device)})
    with previewed(config, cameras := Cameras(*names)) as preview, cameras.running(GREY):
        yield preview


def announce(board: Board, boot_id: str = BOOT_ID, **preview: object) -> None:
    board.say("status", True, state="online", session="s", boot_id=boot_id, ts=1.0)
    board.report(0.5, health={"preview": preview} if preview else {})


def picture(site: Site, path: str = LIVE) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10.0)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("kind", ["port", "socket"])
def test_a_board_of_this_machine_is_seen_live(any_broker: RealBroker, tmp_path: Path, kind: str) -> None:
    address = "127.0.0.1:0" if kind == "port" else str(tmp_path / "preview.sock")
    with (
        serving(any_broker.endpoint) as site,
        Board(any_broker.endpoint, "gate") as board,
        showing(address, ("yard", "a b/ü")) as preview,
    ):
        announce(board, address=preview.address)
        eventually(lambda: picture(site)[0] == 200)
        status, jpeg = picture(site, f"{LIVE}?camera=a%20b%2F%C3%BC")
        assert status == 200
        assert 140.0 < brightness(jpeg) < 180.0
        assert 'data-cameras=\'[["yard"' in site.page("/boards/gate")
        assert picture(site, f"{LIVE}?camera=none")[0] == 502
        assert picture(site, "/boards/nobody/live.jpg")[0] == 404


def test_nothing_is_fetched_that_is_not_this_boards_preview(any_broker: RealBroker) -> None:
    """Its address comes by MQTT: a stranger may name any port of this machine, or any machine."""
    with (
        serving(any_broker.endpoint) as site,
        Board(any_broker.endpoint, "gate") as board,
        showing("127.0.0.1:0", device="other") as preview,
    ):
        for address, reason in {
            preview.address: "not this board's preview",
            f"http://127.0.0.1:{free_port()}": "Connect call failed",
            "http://192.0.2.1:80": "no address of this machine",
            "http://localhost.example:80": "no address of this machine",
            "ftp://127.0.0.1:80": "no address of this machine",
            "unix:/proc/self/mem": "/proc/self/mem: ",
            "http://[": "no address of this machine",
        }.items():
            announce(board, address=address)
            eventually(lambda: reason in picture(site)[1].decode())  # noqa: B023  # called at once
            assert picture(site)[0] == 502


def test_why_there_is_no_picture_stands_on_the_page(any_broker: RealBroker) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate") as board:
        for preview, reason in (
            ({}, "preview.address is not set"),
            ({"address": None, "error": "preview.privacy"}, "owner does not allow it (privacy.preview)"),
            ({"address": None, "error": "preview.address"}, "cannot show one (preview.address)"),
            ({"address": "http://127.0.0.1:1", "boot_id": "another"}, "another machine"),
        ):
            boot_id = str(preview.pop("boot_id", BOOT_ID))
            announce(board, boot_id, **preview)
            eventually(lambda: site.boards.get("gate") is not None and reason in site.page("/boards/gate"))  # noqa: B023  # called at once
            assert "data-cameras='[]'" in site.page("/boards/gate")
        board.say("status", True, state="offline", session="s", boot_id=BOOT_ID, ts=2.0)
        eventually(lambda: "the board is not online" in site.page("/boards/gate"))
