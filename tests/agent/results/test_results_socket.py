"""Results on a Unix socket: whole lines for every reader, and no other waits for a slow one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import eventually
from results_bench import detections, frames_of, line
from turned_clock import TurnedClock

from agent.common.errors import ConfigError
from agent.results.socket_output import MAX_READERS, ResultsSocket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "results.sock"


@pytest.fixture
def output(path: Path) -> Iterator[ResultsSocket]:
    output = ResultsSocket(path)
    yield output
    output.close()


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(10.0)
        eventually(lambda: reader.connect_ex(str(path)) == 0)  # it is bound, and so there, before it listens
        yield reader


def read_lines(reader: socket.socket, count: int) -> bytes:
    """So many lines, or all to the end of the stream."""
    content = b""
    while content.count(b"\n") < count and (read := reader.recv(65536)):
        content += read
    return content


def test_each_reader_gets_every_line_from_when_it_connects(path: Path, output: ResultsSocket) -> None:
    output.add(line(0))
    with connected(path) as first:
        output.add(line(1))
        with connected(path) as second:
            output.add(line(2))
            assert frames_of(read_lines(first, 2)) == [1, 2]
            assert read_lines(second, 1) == line(2).encoded
    output.add(line(3))
    assert output.dropped == 0


def test_a_slow_reader_loses_whole_lines_of_its_own(path: Path, output: ResultsSocket) -> None:
    with connected(path) as slow, connected(path) as quick:
        seen = b""
        for number in range(3000):
            output.add(line(number, detections(0.5, 0.4)))
            seen += read_lines(quick, 1)
        assert frames_of(seen) == list(range(3000))
        lost = output.dropped
        assert lost > 1000
        begun = read_lines(slow, 1)
        output.tick()
        for number in range(3000, 3010):
            output.add(line(number))
        output.close()
        frames = frames_of(begun + read_lines(slow, 10**9))
        assert output.dropped == lost
        assert len(frames) == 3010 - lost
        assert frames == sorted(frames)
        assert frames[-10:] == list(range(3000, 3010))


def test_a_line_longer_than_the_kernel_keeps_arrives_whole(path: Path, output: ResultsSocket) -> None:
    long = line(0, detections(*[0.5] * 20_000))
    assert len(long.encoded) > 1_000_000
    with connected(path) as reader:
        output.add(long)
        output.add(line(1))
        assert output.dropped == 1
        content = b""
        while not content.endswith(b"\n"):
            assert output.tick() < 0.1 or content
            content += reader.recv(65536)
        assert content == long.encoded
        output.add(line(2))
        assert read_lines(reader, 1) == line(2).encoded


def test_only_so_many_readers_until_one_goes(path: Path, output: ResultsSocket) -> None:
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(connected(path)) for _ in range(MAX_READERS)]
        output.tick()
        with connected(path) as refused:
            output.tick()
            assert refused.recv(1) == b""
        readers[0].shutdown(socket.SHUT_WR)  # has nothing to say, and reads on
        readers[1].close()
        with connected(path) as admitted:
            output.add(line(0))
            for reader in (readers[0], *readers[2:], admitted):
                assert read_lines(reader, 1) == line(0).encoded


def test_owner_and_group_may_connect(path: Path, output: ResultsSocket) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    output.close()
    assert not path.exists()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    output = ResultsSocket(path)
    with connected(path) as reader:
        output.add(line(0))
        assert frames_of(read_lines(reader, 1)) == [0]
    output.close()


def test_a_socket_of_another_daemon_is_left_alone(path: Path, output: ResultsSocket) -> None:
    with pytest.raises(ConfigError, match="in use"):
        ResultsSocket(path)
    with connected(path) as reader:
        output.add(line(0))
        assert frames_of(read_lines(reader, 1))[-1] == 0


def test_a_file_that_has_taken_the_place_of_the_socket_is_not_removed(path: Path, output: ResultsSocket) -> None:
    path.unlink()
    path.write_text("another")
    output.close()
    assert path.read_text() == "another"


@pytest.mark.parametrize("name", ["file", "x" * 200, "file/below"])
def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"^results\.socket: "):
        ResultsSocket(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("refusal", [errno.EROFS, errno.ENOSPC])
def test_a_disk_that_refuses_the_socket_is_reported_and_asked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    clock = TurnedClock()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", raising(OSError(refusal, os.strerror(refusal))))
        output = ResultsSocket(path, clock)
        output.add(line(0))
        assert output.trouble is not None
        assert os.strerror(refusal) in output.trouble.found
        output.tick()
        assert output.trouble is not None
    output.tick()
    assert output.trouble is not None, "not yet"
    clock.turn(60.0)
    output.tick()
    assert output.trouble is None
    with connected(path) as reader:
        output.add(line(1))
        assert frames_of(read_lines(reader, 1)) == [1]
    output.close()


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
