"""Models on their way to a board: over HTTP and in chunks, cut off, wrong, too large, too slow, and again."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import eventually
from device import NOW

from agent import receiving, staged_model
from agent.commands import Report
from agent.errors import AgentError
from agent.model_delivery import ModelDelivery
from agent.receiving import Fetch, Incoming
from agent.releases import Releases
from agent.requests import MODEL_CHUNK_BYTES, CommandResult, ModelArgs
from agent.staged_model import StagedModel

CONTENT = bytes(range(256)) * 400  # 3 chunks and a bit
SHA = hashlib.sha256(CONTENT).hexdigest()


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


class Board:
    """What is delivered comes to `model`, for `try_out` passes all; `end` runs what other threads have posted."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.model = folder / "served" / "model.onnx"
        self.model.parent.mkdir(exist_ok=True)
        self.model.write_bytes(b"before")
        self.incoming = folder / "state" / "incoming"
        self.results: list[CommandResult] = []
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        options = {"watched": True, "reserve_bytes": 0, **changes}
        releases = Releases(None, folder / "releases.json")
        self.delivery = ModelDelivery(
            self.incoming, self.model, releases=releases, post=self._posted.put, try_out=self.try_out, **options
        )

    def try_out(self, staged: StagedModel) -> None:
        assert self.model.is_dir() or self.model.read_bytes() == b"before", "not before it has been tried"
        assert staged.file.read_bytes() == CONTENT
        staged.install()
        staged.report.succeed()

    def begin(self, url: str | None = None, **changes: Any) -> None:
        args = ModelArgs(**{"sha256": SHA, "size": len(CONTENT), "url": url, **changes})
        self.delivery.begin(args, Report(f"c{len(self.results)}", self.results.append), NOW)

    def chunk(self, number: int, sha: str = SHA, content: bytes | None = None) -> None:
        at = number * MODEL_CHUNK_BYTES
        part = CONTENT[at : at + MODEL_CHUNK_BYTES] if content is None else content
        self.delivery.receive(f"tared/v1/fleet/board/model/{sha}/{number}", part)

    def step(self) -> CommandResult:
        """The latest result."""
        self.delivery.tick()
        while not self._posted.empty():
            self._posted.get()()
        return self.results[-1]

    def end(self) -> str:
        """The status, or the error's words, at the end."""
        eventually(lambda: self.step().final)
        last = self.results[-1]
        return last.status if last.error is None else last.error.message

    @property
    def wanted(self) -> int:
        """The chunk that it asked for last."""
        return next(int(str(each.result["next"])) for each in reversed(self.results) if each.result)

    @property
    def kept(self) -> int:
        return sum(path.stat().st_size for path in self.incoming.iterdir())


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_a_model_is_fetched_and_put_in_its_place(board: Board, url: str) -> None:
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert board.model.read_bytes() == CONTENT
    assert [path.name for path in board.model.parent.iterdir()] == ["model.onnx"]
    assert board.kept == 0
    assert {each.step for each in board.results if each.step} == {"FETCHING"}, "as often as it comes in blocks"


def test_what_a_server_cut_off_is_gone_on_with(board: Board, url: str) -> None:
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


def test_a_server_that_is_not_there_is_named(board: Board) -> None:
    board.begin("http://127.0.0.1:9/model.onnx")
    assert "refused" in board.end()


def test_chunks_are_asked_for_and_taken_in_their_order(board: Board) -> None:
    board.begin()
    assert board.wanted == 0
    for number in (1, 0, 0, 3, 1, 2, 2, 3):
        board.chunk(number)
    assert board.end() == "SUCCEEDED"
    assert board.model.read_bytes() == CONTENT


def test_chunks_that_nobody_asked_for_are_passed_over(board: Board) -> None:
    board.chunk(0)
    board.begin()
    board.chunk(0, sha="0" * 64)
    board.chunk(0, content=b"short")
    board.chunk(0, content=b"x" * (MODEL_CHUNK_BYTES + 1))
    board.delivery.receive("tared/v1/fleet/board/model/x", b"")
    assert board.kept == 0
    for number in range(4):
        board.chunk(number)
    assert board.end() == "SUCCEEDED"


def forge(board: Board) -> None:
    """Chunks as they are asked for, of which the first is somebody else's."""
    board.chunk(0, content=bytes(MODEL_CHUNK_BYTES))
    for number in range(1, 4):
        board.chunk(number)


def begun_anew(board: Board) -> bool:
    board.step()
    return [each.result for each in board.results].count({"next": 0}) == 2


def test_a_forged_chunk_costs_a_second_transfer_and_not_the_delivery(board: Board) -> None:
    board.begin()
    forge(board)
    eventually(lambda: begun_anew(board))
    for number in range(4):
        board.chunk(number)
    assert board.end() == "SUCCEEDED"
    assert board.model.read_bytes() == CONTENT


def test_chunks_that_were_sent_wrong_twice_are_no_model(board: Board) -> None:
    board.begin()
    forge(board)
    eventually(lambda: begun_anew(board))
    forge(board)
    assert "a file of another SHA-256" in board.end()
    assert (board.model.read_bytes(), board.kept) == (b"before", 0)


def test_a_server_that_begins_anew_is_not_too_slow_for_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT[: 3 * len(CONTENT) // 4])
    incoming = Incoming(part, ModelArgs(sha256=SHA, size=len(CONTENT)), Report("c1", lambda _: None))
    fetch = Fetch(incoming, lambda _: None)
    fetch.bring(f"{url}/whole-cut")
    assert incoming.size == len(CONTENT) // 2, "less than there was"
    monkeypatch.setattr(receiving, "_PERIOD_S", -1.0)
    monkeypatch.setattr(receiving, "_LEAST_BYTES", len(CONTENT) // 2)
    fetch.tick()
    with pytest.raises(AgentError, match="0 bytes in"):
        fetch.tick()


@pytest.mark.parametrize(("limit", "words"), [("_PERIOD_S", "at least"), ("_MOST_S", "all 102400")])
def test_a_server_that_trickles_does_not_occupy_the_board(
    board: Board, url: str, monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    monkeypatch.setattr(receiving, limit, 0.2)
    board.begin(f"{url}/trickle")
    assert words in board.end()
    assert board.model.read_bytes() == b"before"
    board.begin(f"{url}/model.onnx")
    monkeypatch.undo()
    assert board.end() == "SUCCEEDED"


def test_what_trickles_is_written_as_it_comes_and_ended_by_cancel(board: Board, url: str) -> None:
    board.begin(f"{url}/trickle")
    eventually(lambda: board.kept > 0)
    assert board.delivery.end("the operator cancels it")
    assert "the operator cancels it" in board.end()
    assert not board.delivery.end("the operator cancels it"), "there is none any more"
    kept = board.kept
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert Server.asked[-1] == ("/model.onnx", f"bytes={kept}-"), "nothing was written after the end"


def test_chunks_are_cancelled(board: Board) -> None:
    board.begin()
    board.chunk(0)
    assert board.delivery.end("the operator cancels it")
    board.chunk(1)
    assert "the operator cancels it" in board.end()
    board.begin()
    assert board.wanted == 1


def test_a_sender_that_falls_silent_is_asked_again_and_then_given_up(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.begin()
    board.chunk(0)
    monkeypatch.setattr(receiving, "_ASK_AGAIN_S", 0.0)
    board.delivery.tick()
    assert board.wanted == 1
    monkeypatch.setattr(receiving, "_SILENCE_S", 0.0)
    assert "no chunk for" in board.end()
    board.begin()
    assert board.wanted == 1, "it goes on where it ended"


def test_what_another_process_received_is_gone_on_with(tmp_path: Path, board: Board) -> None:
    board.begin()
    board.chunk(0)
    (path,) = board.incoming.iterdir()
    path.write_bytes(path.read_bytes() + b"half a chunk")
    later = Board(tmp_path)
    later.begin()
    assert later.wanted == 1
    for number in (1, 2, 3):
        later.chunk(number)
    assert later.end() == "SUCCEEDED"
    assert later.model.read_bytes() == CONTENT


def refusal(begin: Callable[[], None]) -> str:
    with pytest.raises(AgentError) as caught:
        begin()
    return caught.value.code


def test_one_at_a_time_and_what_came_of_another_goes(board: Board) -> None:
    board.begin()
    board.chunk(0)
    assert refusal(board.begin) == "command.busy"


def test_what_came_of_another_model_is_removed(tmp_path: Path, board: Board) -> None:
    board.begin()
    board.chunk(0)
    later = Board(tmp_path)
    later.begin(sha256="0" * 64)
    assert board.kept == 0


def test_a_board_without_room_or_without_a_watch_says_so(tmp_path: Path) -> None:
    assert refusal(Board(tmp_path, reserve_bytes=2**60).begin) == "command.model"
    assert refusal(Board(tmp_path, watched=False).begin) == "command.model"
    blocked = Board(tmp_path)
    blocked.incoming.rmdir()
    blocked.incoming.write_text("no folder")
    assert refusal(functools.partial(blocked.begin)) == "command.model"


def test_what_a_killed_process_half_copied_goes(board: Board, url: str) -> None:
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


def test_a_disk_that_refuses_while_chunks_come_fails_the_command(board: Board) -> None:
    board.begin()
    board.chunk(0)
    (part,) = board.incoming.iterdir()
    part.unlink()
    part.mkdir()
    board.chunk(1)
    assert "IsADirectoryError" in board.end()


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
        board.delivery._destination = Path(other) / "model.onnx"
        full = usage._replace(free=len(CONTENT) - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full if path == Path(other) else usage)
        with pytest.raises(AgentError, match=other):
            board.begin()


def test_the_rename_is_on_the_disk(board: Board, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(staged_model, "sync_folder", synced.append)
    board.begin(f"{url}/model.onnx")
    assert board.end() == "SUCCEEDED"
    assert synced == [board.model.parent]
