"""Authority over a board: attacks with old, withheld, misdirected and stolen commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from authority_bench import Board, board
from device import NOW, TOPICS
from kept import kept_in, spoil

from agent.commands.authority import Authority
from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import CommandLog
from agent.common.errors import ConfigError
from agent.common.http.addresses import is_loopback
from agent.config import CommandsConfig
from agent.contract.commands import CommandResult
from agent.mqtt.message import Reply
from agent.state.store import StateStore

__all__ = ["board"]  # the fixture

DAY_S = 86_400.0


def test_a_release_key_commands_nothing(board: Board) -> None:
    assert board.receive(board.order("rel")) == ("REJECTED", "command.signature")
    assert board.did == 0
    assert board.receive(board.order("bob")) == ("SUCCEEDED", "")


def test_commands_of_a_key_that_was_removed_do_nothing(board: Board, tmp_path: Path) -> None:
    """A thief repeats commands after the key was removed: new ones, and one that was carried out."""
    seen, waiting = board.order("bob", id="c1"), board.order("bob", id="c2", version=2)
    assert board.receive(seen) == ("SUCCEEDED", "")
    config = CommandsConfig(operator_keys=(tmp_path / "ann.pub",), release_keys=(tmp_path / "rel.pub",))
    board.authority = Authority(config, TOPICS, False, lambda: True)
    board.restart()
    assert board.receive(waiting) == ("REJECTED", "command.signature")
    assert board.receive(seen) == ("SUCCEEDED", "")  # as the log has it
    assert board.receive(waiting) == ("REJECTED", "command.signature")
    assert board.did == 0
    assert board.receive(board.order("ann", id="c3", version=3)) == ("SUCCEEDED", "")


def test_a_command_for_another_board_is_none_for_this_one(board: Board) -> None:
    assert board.receive(board.order(to="fleet/other")) == ("REJECTED", "command.target")
    assert board.receive(board.order(to=None)) == ("REJECTED", "command.target")
    assert board.receive(board.order(to=["fleet/board"])) == ("REJECTED", "command.target")
    assert board.did == 0


def test_a_command_that_was_withheld_has_expired(board: Board) -> None:
    """The freeze attack: an attacker in the network delivers an honest command later."""
    assert board.receive(board.order(), NOW + 60.0) == ("EXPIRED", "command.expired")
    assert board.did == 0


def test_a_board_that_does_not_know_the_time_says_so(board: Board) -> None:
    board.synchronised = False
    assert board.receive(board.order()) == ("REJECTED", "command.clock")
    assert board.did == 0
    board.synchronised = True
    assert board.receive(board.order()) == ("SUCCEEDED", "")


@pytest.mark.parametrize("config", [{"local": True, "unsigned": "allow"}, {"clock": "trusted"}])
def test_its_clock_is_good_enough_where_unsigned_counts_too_or_where_that_was_said(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    board = Board(tmp_path, **config)
    board.synchronised = False
    assert board.receive(board.order()) == ("SUCCEEDED", "")


def test_a_loopback_broker_does_not_replace_a_clock_for_a_board_with_keys(tmp_path: Path) -> None:
    """A bridge to the broker may have kept a command back."""
    board = Board(tmp_path, local=True)
    board.synchronised = False
    assert board.receive(board.order()) == ("REJECTED", "command.clock")


def test_a_replay_to_a_board_that_has_lost_its_log_does_nothing(board: Board) -> None:
    order = board.order(expires=NOW + DAY_S)
    board.receive(order)
    spoil(board.folder, "DELETE FROM commands")
    for _ in range(2):
        board.restart()
        assert board.receive(order, NOW + 9.0) == ("REJECTED", "command.forgotten")
        assert board.did == 0
    assert board.receive(board.order(id="c2", issued=NOW + 1.0), NOW + 9.0) == ("SUCCEEDED", "")


@pytest.mark.parametrize("lost", ["replay_guard", ""], ids=["the log is whole", "both are lost"])
def test_without_its_guard_a_lost_log_is_as_old_as_this_start(board: Board, lost: str) -> None:
    order = board.order(expires=NOW + DAY_S)
    board.receive(order)
    if lost:
        spoil(board.folder, f"DELETE FROM {lost}")
        CommandLog(kept_in(board.folder))
        spoil(board.folder, "DELETE FROM commands")
    else:
        (board.folder / "state.sqlite").write_bytes(b"no database at all")
        CommandLog(StateStore(board.folder))
    board.restart()
    assert board.receive(order, NOW + 9.0) == ("REJECTED", "command.forgotten")


def test_a_log_that_is_lost_while_the_daemon_runs_lets_no_replay_in(board: Board) -> None:
    order = board.order(expires=NOW + DAY_S)
    board.receive(order)
    board.state.report_to(lambda _: None)
    (board.folder / "state.sqlite").unlink()
    assert board.receive(board.order(id="c2"), NOW + 9.0) == ("REJECTED", "state.write")
    assert board.receive(board.order(id="c2"), NOW + 9.0) == ("REJECTED", "command.forgotten")
    board.restart()
    assert board.receive(order, NOW + 9.0) == ("REJECTED", "command.forgotten")


def test_a_replay_after_the_clock_has_jumped_ahead_and_back_does_nothing(board: Board) -> None:
    order = board.order(expires=NOW + 29 * DAY_S)
    board.receive(order)
    ahead = NOW + 3650 * DAY_S
    board.receive(board.order(id="c2", issued=ahead, expires=ahead + 60.0), ahead)
    board.restart()
    assert board.receive(order, NOW + 9.0) == ("REJECTED", "command.forgotten")
    assert board.did == 0


class Replies:
    """A board's answers on the topics that senders name."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.sent: list[tuple[str, str, str]] = []
        desk = CommandDispatcher(
            board.device.handlers(), board.results.append, authority=board.authority, reply=self._take
        )
        self.desk = desk

    def _take(self, reply: Reply, result: CommandResult) -> None:
        self.sent.append((reply.topic, result.id, result.status))

    def receive(self, payload: bytes, topic: str, correlation: bytes = b"") -> None:
        self.desk.receive(payload, NOW, reply=Reply(topic, correlation))


def test_an_unsigned_message_takes_over_no_replies_and_is_answered_on_no_topic_of_its_choice(board: Board) -> None:
    replies = Replies(board)
    replies.receive(board.order(op="recalibrate"), "ann")
    for stranger in (b'{"id":"c1"}', b'{"id":"c9"}', board.order(key=None), board.order("eve"), board.order(to="x/y")):
        replies.receive(stranger, "thief")
    replies.receive(board.order("bob", op="rollback"), "bob")
    board.device.jobs[0][1].succeed()
    assert replies.sent == [("ann", "c1", "ACCEPTED"), ("ann", "c1", "SUCCEEDED")]
    assert [result.id for result in board.results if result.status == "REJECTED"] == ["c9", "c1"], "told on its own"
    replies.receive(board.order(op="recalibrate"), "ann/2")
    assert replies.sent[-1] == ("ann/2", "c1", "SUCCEEDED"), "the same command may ask for its answer elsewhere"


def test_a_long_reply_address_is_ignored(board: Board) -> None:
    replies = Replies(board)
    replies.receive(board.order(), "ann", b"x" * 257)
    replies.receive(board.order(id="c2"), "a" * 257)
    assert replies.sent == []
    replies.receive(board.order(id="c3"), "ann", b"x" * 256)
    assert [status for _, _, status in replies.sent] == ["ACCEPTED", "SUCCEEDED"]


NO_KEYS: dict[str, Any] = {"operator_keys": [], "release_keys": []}


@pytest.mark.parametrize(
    ("config", "obeyed", "warned"),
    [
        ({"local": True, **NO_KEYS}, True, ""),
        ({"local": True}, False, ""),
        ({"local": True, "unsigned": "allow"}, True, ""),
        ({"local": True, "unsigned": "refuse", **NO_KEYS}, False, "every command is refused"),
        ({"local": False, **NO_KEYS}, False, "every command is refused"),
        ({"local": False}, False, ""),
        ({"local": False, "unsigned": "allow", **NO_KEYS}, True, "everyone who may publish"),
        ({"local": False, "unsigned": "allow"}, True, "everyone who may publish"),
    ],
)
def test_when_an_unsigned_command_counts(tmp_path: Path, config: dict[str, Any], obeyed: bool, warned: str) -> None:
    board = Board(tmp_path, **config)
    expected = ("SUCCEEDED", "") if obeyed else ("REJECTED", "command.unsigned")
    assert board.receive(board.order(key=None)) == expected
    assert warned in board.authority.warning
    assert bool(warned) == bool(board.authority.warning)
    assert board.authority.description["unsigned"] is (obeyed and not config["local"])


def test_where_unsigned_counts_a_bad_signature_does_not(tmp_path: Path) -> None:
    board = Board(tmp_path, unsigned="allow")
    assert board.receive(board.order("eve")) == ("REJECTED", "command.signature")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        (None, True),
        ("127.0.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_which_broker_only_this_machine_reaches(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_key_has_one_role(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key\.roles"):
        Board(tmp_path, release_keys=[tmp_path / "ann.pub"])
