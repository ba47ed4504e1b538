"""Models on their way to a board over HTTP, and into their place: cut off, wrong, too slow, without room, and again."""

from __future__ import annotations

import errno
import http.server
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brokers import eventually
from delivery_bench import CONTENT, SHA, Board, board
from turned_clock import TurnedClock

from agent.commands import deliveries, file_transfer
from agent.commands.deliveries import ModelAdmission
from agent.commands.dispatcher import CommandProgress
from agent.commands.file_transfer import HttpDownload, PartialFile
from agent.common.errors import AgentError
from agent.contract.commands import ModelArgs

__all__ = ["board"]  # the fixture


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves CONTENT as /model.onnx from any byte on; the other paths are traps."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012  one list for all requests is what is wanted
    gone = threading.Event()

    def do_GET(self) -> None:
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.asked.append((self.path, self.headers.get("Range")))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        ranged = begin and not self.path.startswith("/whole")
        body = {"/other": CONTENT[::-1], "/long": CONTENT + b"x"}.get(self.path, CONTENT)[begin if ranged else 0 :]
        if self.path == "/none":
            self.send_error(404)
            return
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/trickle":
            for byte in body:
                self.wfile.write(bytes([byte]))
                if self.gone.wait(0.02):
                    return
        elif self.path.endswith("cut"):
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked.clear()
    Server.gone.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        Server.gone.set()
        server.shutdown()
        thread.join()


def test_a_download_that_was_cut_off_continues(board: Board, url: str) -> None:
    board.begin(f"{url}/cut")
    assert f"{len(CONTENT) // 2} of {len(CONTENT)} bytes" in board.end()
    assert board.model.read_bytes() == b"before"
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert Server.asked == [("/cut", None), ("/model.onnx", f"bytes={len(CONTENT) // 2}-")]
    assert board.model.read_bytes() == CONTENT


def test_a_server_that_cannot_go_on_begins_anew(board: Board, url: str) -> None:
    board.begin(f"{url}/cut")
    board.end()
    board.begin(f"{url}/whole")
    assert board.end() == "SUCCEEDED"
    assert board.model.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/other", "a file of another SHA-256"),
        ("/long", f"more than {len(CONTENT)} bytes"),
        ("/none", "404"),
        ("/redirect", "not allowed"),
    ],
)
def test_another_file_than_was_named_stays_out(board: Board, url: str, path: str, words: str) -> None:
    board.begin(url + path)
    assert words in board.end()
    assert board.model.read_bytes() == b"before"
    assert board.kept == 0
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"


def test_a_server_that_begins_anew_is_not_too_slow_for_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT[: 3 * len(CONTENT) // 4])
    incoming = PartialFile(part, ModelArgs(sha256=SHA, size=len(CONTENT)), CommandProgress("c1", lambda _: None))
    clock = TurnedClock()
    fetch = HttpDownload(incoming, lambda _: None, clock)
    fetch.run(f"{url}/whole-cut")
    assert incoming.size == len(CONTENT) // 2, "less than there was"
    monkeypatch.setattr(file_transfer, "_LEAST_BYTES", len(CONTENT) // 2)
    clock.turn(file_transfer._PERIOD_S + 1.0)
    fetch.tick()
    clock.turn(file_transfer._PERIOD_S + 1.0)
    with pytest.raises(AgentError, match="0 bytes in"):
        fetch.tick()


@pytest.mark.parametrize(("limit", "words"), [("_PERIOD_S", "at least"), ("_MOST_S", "all 102400")])
def test_a_server_that_trickles_does_not_occupy_the_board(board: Board, url: str, limit: str, words: str) -> None:
    board.begin(f"{url}/trickle")
    board.clock.turn(getattr(file_transfer, limit) + 1.0)
    assert words in board.end()
    assert board.model.read_bytes() == b"before"
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"


def test_a_slow_download_is_written_as_it_comes_and_can_be_cancelled(board: Board, url: str) -> None:
    board.begin(f"{url}/trickle")
    eventually(lambda: board.kept > 0)
    assert board.delivery.end("the operator cancels it")
    assert "the operator cancels it" in board.end()
    assert not board.delivery.end("the operator cancels it"), "there is none any more"
    kept = board.kept
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert Server.asked[-1] == ("/model.onnx", f"bytes={kept}-"), "nothing was written after the end"


def test_a_half_copied_model_of_a_killed_process_is_removed(board: Board, url: str) -> None:
    (board.model.parent / ".model.onnx.77.new").write_bytes(b"half")
    (board.model.parent / ".model.onnx.ab.78.new").mkdir()
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert [path.name for path in board.model.parent.iterdir()] == ["model.onnx"]


def test_a_place_that_cannot_be_written_is_named(board: Board, url: str) -> None:
    board.model.unlink()
    board.model.mkdir()
    board.begin(f"{url}/model.onnx")
    assert str(board.model) in board.end()
    assert [path.name for path in board.model.parent.iterdir()] == ["model.onnx"]


def test_folders_in_the_place_of_what_is_received_are_cleared_away(board: Board, url: str) -> None:
    for name in ("sub", f"{SHA}.part", f".{SHA}.part.gone"):
        (board.incoming / name / "deep").mkdir(parents=True)
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert board.kept == 0


def test_without_hard_links_it_is_copied_where_there_is_room(
    board: Board, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    with monkeypatch.context() as patched:
        usage = shutil.disk_usage(board.model.parent)
        full = usage._replace(free=len(CONTENT) - 1)
        patched.setattr(shutil, "disk_usage", lambda path: full if Path(path) == board.model.parent else usage)
        board.begin(f"{url}/model.onnx")
        assert str(board.model.parent) in board.end()
    assert board.model.read_bytes() == b"before"
    assert [path.name for path in board.model.parent.iterdir()] == ["model.onnx"]
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert Server.asked == [("/model.onnx", None)], "it was all there"


def test_the_other_disk_is_looked_at_before_anything_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, usage = Board(tmp_path), shutil.disk_usage(tmp_path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:  # a disk of its own
        assert isinstance(board.delivery.admit, ModelAdmission)
        board.delivery.admit = replace(board.delivery.admit, destination=Path(other) / "model.onnx")
        full = usage._replace(free=len(CONTENT) - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full if path == Path(other) else usage)
        with pytest.raises(AgentError, match=other):
            board.begin()


def test_the_rename_is_on_the_disk(board: Board, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(deliveries, "sync_folder", synced.append)
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert synced == [board.model.parent]
