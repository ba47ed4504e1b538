"""Who may command a board: attacks with old, withheld, misdirected and stolen words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device import NOW, TOPICS, Device

from agent.authority import Authority
from agent.clock import is_synchronised
from agent.command_log import CommandLog
from agent.commands import CommandDesk
from agent.commands_config import CommandsConfig, is_loopback
from agent.errors import CommandError, ConfigError
from agent.releases import Releases
from agent.requests import CommandResult, ModelArgs
from agent.signing import Signer, new_key

DAY_S = 86_400.0


class Board:
    """Its keys: ann and bob operate, rel releases; eve has a key of her own."""

    def __init__(self, folder: Path, local: bool = False, **config: Any) -> None:
        self.folder = folder
        self.keys = {name: Signer(_key(folder / name)) for name in ("ann", "bob", "rel", "eve")}
        self.synchronised = True
        keys = {"operator_keys": [folder / "ann.pub", folder / "bob.pub"], "release_keys": [folder / "rel.pub"]}
        self.authority = Authority(CommandsConfig(**{**keys, **config}), TOPICS, local, lambda: self.synchronised)
        self.restart()

    def restart(self) -> None:
        self.device = Device()
        self.results: list[CommandResult] = []
        journal = CommandLog(self.folder / "commands.sqlite", lambda error: pytest.fail(str(error)))
        self.desk = CommandDesk(self.device.handlers(), self.results.append, journal=journal, authority=self.authority)

    def receive(self, payload: bytes, now: float = NOW) -> tuple[str, str]:
        """The status and the code that this command ends with."""
        self.desk.receive(payload, now)
        last = self.results[-1]
        return last.status, last.error.code if last.error else ""

    @property
    def did(self) -> int:
        return len(self.device.done_with) + len(self.device.jobs) + self.device.status_calls

    def order(self, key: str | None = "ann", **changes: Any) -> bytes:
        fields = {"id": "c1", "op": "restart", "args": {}, "issued": NOW, "expires": NOW + 60, "version": 1}
        document = {**fields, "to": "fleet/board", **changes}
        return json.dumps(self.keys[key].sign(document) if key else document).encode()


def _key(path: Path) -> Path:
    private = path.with_suffix(".key")
    return private if private.exists() else new_key(path)[0]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


@pytest.mark.parametrize("key", ["ann", "bob"])
def test_an_operator_is_obeyed(board: Board, key: str) -> None:
    assert board.receive(board.order(key)) == ("SUCCEEDED", "")
    assert board.did == 1


@pytest.mark.parametrize("key", ["eve", "rel"])
def test_another_key_is_not_and_a_release_key_is_another(board: Board, key: str) -> None:
    assert board.receive(board.order(key)) == ("REJECTED", "command.signature")
    assert board.did == 0


def test_a_changed_command_is_refused(board: Board) -> None:
    for field, value in {"op": "rollback", "id": "c9", "expires": NOW + 1e6, "version": 2}.items():
        forged = {**json.loads(board.order()), field: value}
        assert board.receive(json.dumps(forged).encode()) == ("REJECTED", "command.signature")
    with_more = {**json.loads(board.order()), "comment": "harmless"}
    assert board.receive(json.dumps(with_more).encode()) == ("REJECTED", "command.signature")
    assert board.did == 0


def test_a_replayed_command_is_answered_and_does_nothing(board: Board) -> None:
    """The same bytes, at once, after a restart, and within the time that they are valid."""
    order = board.order(expires=NOW + 29 * DAY_S)
    board.receive(order)
    assert board.receive(order) == ("SUCCEEDED", "")
    assert board.did == 1
    board.restart()
    assert board.receive(order, NOW + 28 * DAY_S) == ("SUCCEEDED", "")
    assert board.did == 0


def test_a_command_for_another_board_is_none_for_this_one(board: Board) -> None:
    assert board.receive(board.order(to="fleet/other")) == ("REJECTED", "command.target")
    assert board.receive(board.order(to=None)) == ("REJECTED", "command.target")
    assert board.receive(board.order(to=["fleet/board"])) == ("REJECTED", "command.target")
    assert board.did == 0


def test_a_command_that_was_withheld_has_expired(board: Board) -> None:
    """The freeze attack: whoever holds the network lets an honest word through when it does harm."""
    assert board.receive(board.order(), NOW + 60.0) == ("EXPIRED", "command.expired")
    assert board.did == 0


def test_a_board_that_does_not_know_the_time_says_so(board: Board) -> None:
    board.synchronised = False
    assert board.receive(board.order()) == ("REJECTED", "command.clock")
    assert board.did == 0
    board.synchronised = True
    assert board.receive(board.order()) == ("SUCCEEDED", "")


@pytest.mark.parametrize("config", [{"local": True}, {"clock": "trusted"}])
def test_its_clock_is_good_enough_for_its_own_broker_or_where_that_was_said(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    board = Board(tmp_path, **config)
    board.synchronised = False
    assert board.receive(board.order()) == ("SUCCEEDED", "")


def test_the_kernel_is_asked_for_the_clock() -> None:
    assert is_synchronised() in (True, False)


NO_KEYS: dict[str, Any] = {"operator_keys": [], "release_keys": []}


@pytest.mark.parametrize(
    ("config", "obeyed", "warned"),
    [
        ({"local": True, **NO_KEYS}, True, ""),
        ({"local": True}, False, ""),
        ({"local": True, "unsigned": "allow"}, True, ""),
        ({"local": True, "unsigned": "refuse", **NO_KEYS}, False, "no command is obeyed"),
        ({"local": False, **NO_KEYS}, False, "no command is obeyed"),
        ({"local": False}, False, ""),
        ({"local": False, "unsigned": "allow", **NO_KEYS}, True, "whoever may publish"),
        ({"local": False, "unsigned": "allow"}, True, "whoever may publish"),
    ],
)
def test_when_an_unsigned_command_counts(tmp_path: Path, config: dict[str, Any], obeyed: bool, warned: str) -> None:
    board = Board(tmp_path, **config)
    expected = ("SUCCEEDED", "") if obeyed else ("REJECTED", "command.unsigned")
    assert board.receive(board.order(key=None)) == expected
    assert warned in board.authority.warning
    assert bool(warned) == bool(board.authority.warning)
    assert board.authority.described["unsigned"] is (obeyed and not config["local"])


def test_where_unsigned_counts_a_bad_signature_does_not(tmp_path: Path) -> None:
    board = Board(tmp_path, unsigned="allow")
    assert board.receive(board.order("eve")) == ("REJECTED", "command.signature")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        (None, True),
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("192.168.1.2", False),
        ("0.0.0.0", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_which_broker_only_this_machine_reaches(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_one_key_has_one_role(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key\.roles"):
        Board(tmp_path, release_keys=[tmp_path / "ann.pub"])


SHA = "ab" * 32


def statement(**changes: Any) -> dict[str, Any]:
    release = {"kind": "release", "sha256": SHA, "size": 10, "version": 5, "issued": NOW, "expires": NOW + 60.0}
    return {**release, **changes}


@pytest.fixture
def releases(board: Board, tmp_path: Path) -> Callable[[], Releases]:
    return lambda: Releases(board.authority, tmp_path / "releases.json")


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


def test_an_expired_release_brings_no_model(board: Board, releases: Callable[[], Releases]) -> None:
    """The freeze attack on what may run: a release is good for as long as its maker said."""
    assert refusal(releases(), board.keys["rel"].sign(statement()), NOW + 60.0) == "command.release"


def test_an_older_release_is_no_way_back(board: Board, releases: Callable[[], Releases]) -> None:
    """The rollback attack: an old model with known faults, validly signed in its day."""

    def args(version: int) -> ModelArgs:
        return ModelArgs(sha256=SHA, size=10, release=board.keys["rel"].sign(statement(version=version)))

    taken = releases().check(args(5), NOW)
    assert taken is not None
    releases().take_up(*taken)
    after_a_restart = releases()
    assert refusal(after_a_restart, args(4).release) == "command.rollback"
    assert after_a_restart.check(args(5), NOW)
    assert after_a_restart.check(args(6), NOW)


def test_a_stolen_release_key_that_is_trusted_no_more_blocks_nothing(board: Board, tmp_path: Path) -> None:
    """The fast-forward attack: the thief has released the highest of versions."""
    stolen = Releases(board.authority, tmp_path / "releases.json")
    highest = board.keys["rel"].sign(statement(version=2**53 - 1))
    taken = stolen.check(ModelArgs(sha256=SHA, size=10, release=highest), NOW)
    assert taken is not None
    stolen.take_up(*taken)
    mended = Board(tmp_path, release_keys=[tmp_path / "eve.pub"])
    honest = Releases(mended.authority, tmp_path / "releases.json")
    assert refusal(honest, highest) == "command.release"
    assert honest.check(ModelArgs(sha256=SHA, size=10, release=mended.keys["eve"].sign(statement())), NOW)
