"""Which models a board takes: attacks with old, expired, misdirected and stolen releases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authority_bench import Board, board
from device import NOW
from kept import kept_in, refusing, spoil

from agent.commands.authority import Releases
from agent.common.errors import AgentError, CommandError
from agent.contract.commands import ModelArgs
from agent.state.store import StateStore

__all__ = ["board"]  # the fixture

SHA = "ab" * 32


def statement(**changes: Any) -> dict[str, Any]:
    release = {"kind": "release", "sha256": SHA, "size": 10, "version": 5, "issued": NOW, "expires": NOW + 60.0}
    return {**release, **changes}


@pytest.fixture
def releases(board: Board, tmp_path: Path) -> Callable[[], Releases]:
    return lambda: Releases(board.authority, kept_in(tmp_path))


def refusal(releases: Releases, release: dict[str, Any] | None, now: float = NOW) -> str:
    with pytest.raises(CommandError) as caught:
        releases.check(ModelArgs(sha256=SHA, size=10, release=release), now)
    return caught.value.code


def test_an_operator_alone_brings_no_model(board: Board, releases: Callable[[], Releases]) -> None:
    assert refusal(releases(), None) == "command.release"
    assert refusal(releases(), statement()) == "command.release"
    for key in ("ann", "eve"):
        assert refusal(releases(), board.keys[key].sign(statement())) == "command.release"
    assert releases().check(ModelArgs(sha256=SHA, size=10, release=board.keys["rel"].sign(statement())), NOW)


def test_a_release_is_no_command_and_a_command_no_release(board: Board, releases: Callable[[], Releases]) -> None:
    board.desk.receive(json.dumps(board.keys["rel"].sign(statement(id="c1"))).encode(), NOW)
    assert board.results[-1].status == "REJECTED"
    assert refusal(releases(), json.loads(board.order("rel"))) == "command.release"


def test_a_release_of_another_model_is_none_of_this(board: Board, releases: Callable[[], Releases]) -> None:
    for change in ({"sha256": "cd" * 32}, {"size": 11}, {"kind": "command"}, {"more": 1}, {"version": 0}):
        assert refusal(releases(), board.keys["rel"].sign(statement(**change))) == "command.release"
    forged = {**board.keys["rel"].sign(statement()), "version": 6}
    assert refusal(releases(), forged) == "command.release"


def test_a_release_for_other_boards_brings_no_model(board: Board, tmp_path: Path) -> None:
    """The mix-and-match attack: the model of another product, validly signed by the maker of both."""
    gates = Releases(Board(tmp_path, product="gate").authority, kept_in(tmp_path))
    others = Releases(board.authority, kept_in(tmp_path))
    for product, takes, refuses in (("gate", gates, others), (None, others, gates)):
        release = board.keys["rel"].sign(statement(**({"product": product} if product else {})))
        assert takes.check(ModelArgs(sha256=SHA, size=10, release=release), NOW)
        assert refusal(refuses, release) == "command.release"
    assert refusal(gates, board.keys["rel"].sign(statement(product="door"))) == "command.release"


def test_an_expired_release_brings_no_model(board: Board, releases: Callable[[], Releases]) -> None:
    """The freeze attack on what may run: a release is good for as long as its maker said."""
    assert refusal(releases(), board.keys["rel"].sign(statement()), NOW + 60.0) == "command.release"


def test_an_older_release_is_no_way_back(board: Board, releases: Callable[[], Releases]) -> None:
    """The rollback attack: an old model with known faults, validly signed in its day."""

    def args(version: int) -> ModelArgs:
        return ModelArgs(sha256=SHA, size=10, release=board.keys["rel"].sign(statement(version=version)))

    taken = releases().check(args(5), NOW)
    assert taken is not None
    releases().record(*taken)
    after_a_restart = releases()
    assert refusal(after_a_restart, args(4).release) == "command.rollback"
    assert after_a_restart.check(args(5), NOW)
    assert after_a_restart.check(args(6), NOW)


def test_a_stolen_release_key_that_is_trusted_no_more_blocks_nothing(board: Board, tmp_path: Path) -> None:
    """The fast-forward attack: the thief has released the highest of versions."""
    stolen = Releases(board.authority, kept_in(tmp_path))
    highest = board.keys["rel"].sign(statement(version=2**53 - 1))
    taken = stolen.check(ModelArgs(sha256=SHA, size=10, release=highest), NOW)
    assert taken is not None
    stolen.record(*taken)
    mended = Board(tmp_path, release_keys=[tmp_path / "eve.pub"])
    honest = Releases(mended.authority, kept_in(tmp_path))
    assert refusal(honest, highest) == "command.release"
    assert honest.check(ModelArgs(sha256=SHA, size=10, release=mended.keys["eve"].sign(statement())), NOW)


def taken_up(releases: Releases, board: Board, key: str, version: int) -> None:
    release = board.keys[key].sign(statement(version=version))
    taken = releases.check(ModelArgs(sha256=SHA, size=10, release=release), NOW)
    assert taken is not None
    releases.record(*taken)


def test_a_stolen_release_key_hides_no_version_of_an_honest_one(tmp_path: Path) -> None:
    both = [tmp_path / "rel.pub", tmp_path / "eve.pub"]
    Board(tmp_path)  # it makes the keys
    board = Board(tmp_path, release_keys=both)
    releases = Releases(board.authority, kept_in(tmp_path))
    taken_up(releases, board, "rel", 5)
    taken_up(releases, board, "eve", 9)
    mended = Board(tmp_path, release_keys=both[:1])
    honest = Releases(mended.authority, kept_in(tmp_path))
    assert refusal(honest, mended.keys["rel"].sign(statement(version=4))) == "command.rollback"
    taken_up(honest, mended, "rel", 5)


def test_a_disk_that_refused_once_forbids_no_later_release(board: Board, releases: Callable[[], Releases]) -> None:
    one = releases()
    with refusing(one._state):
        for _ in range(2):
            with pytest.raises(AgentError, match=r"state\.write"):
                taken_up(one, board, "rel", 5)
    taken_up(one, board, "rel", 5)
    assert refusal(releases(), board.keys["rel"].sign(statement(version=4))) == "command.rollback"


@pytest.mark.parametrize("is_spoilt_again", [False, True])
def test_where_the_versions_were_lost_no_model_is_taken(
    board: Board, releases: Callable[[], Releases], tmp_path: Path, is_spoilt_again: bool
) -> None:
    taken_up(releases(), board, "rel", 5)
    (tmp_path / "state.sqlite").write_bytes(b"no database at all")
    for _ in range(2):  # the second start finds a sound file
        damaged = Releases(board.authority, StateStore(tmp_path))
        with pytest.raises(AgentError, match=r"state\.damaged: .*\.damaged\.1"):
            taken_up(damaged, board, "rel", 5)
    if is_spoilt_again:
        spoil(tmp_path, "DROP TABLE gains")
        assert StateStore(tmp_path).read("gains", list) is None
        (tmp_path / "state.sqlite.damaged.1").unlink()
        assert Releases(board.authority, StateStore(tmp_path)).damage is not None, "they are no more known than before"
    for aside in tmp_path.glob("*.damaged.*"):
        aside.unlink()
    taken_up(releases(), board, "rel", 5)
