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
from agent.errors import AgentError, CommandError, ConfigError
from agent.publishing import Reply
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


@pytest.mark.parametrize("config", [{"local": True, "unsigned": "allow"}, {"clock": "trusted"}])
def test_its_clock_is_good_enough_where_unsigned_counts_too_or_where_that_was_said(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    board = Board(tmp_path, **config)
    board.synchronised = False
    assert board.receive(board.order()) == ("SUCCEEDED", "")


def test_a_loopback_broker_tells_no_time_to_a_board_with_keys(tmp_path: Path) -> None:
    """What bridges to it may have kept a command back."""
    board = Board(tmp_path, local=True)
    board.synchronised = False
    assert board.receive(board.order()) == ("REJECTED", "command.clock")


def test_a_replay_to_a_board_that_has_lost_its_log_does_nothing(board: Board) -> None:
    order = board.order(expires=NOW + DAY_S)
    board.receive(order)
    (board.folder / "commands.sqlite").unlink()
    for _ in range(2):
        board.restart()
        assert board.receive(order, NOW + 9.0) == ("REJECTED", "command.forgotten")
        assert board.did == 0
    assert board.receive(board.order(id="c2", issued=NOW + 1.0), NOW + 9.0) == ("SUCCEEDED", "")


@pytest.mark.parametrize("bound", [None, b"damaged"])
def test_where_nobody_knows_how_old_the_lost_log_was_it_is_as_old_as_this_start(
    board: Board, bound: bytes | None
) -> None:
    order = board.order(expires=NOW + DAY_S)
    board.receive(order)
    (board.folder / "commands.sqlite").write_bytes(b"no database at all")
    (board.folder / "commands.json").unlink()
    if bound is not None:
        (board.folder / "commands.json").write_bytes(bound)
    CommandLog(board.folder / "commands.sqlite", lambda _: None)
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
        self.heard: list[tuple[str, str, str]] = []
        desk = CommandDesk(board.device.handlers(), board.results.append, authority=board.authority, reply=self._take)
        self.desk = desk

    def _take(self, reply: Reply, result: CommandResult) -> None:
        self.heard.append((reply.topic, result.id, result.status))

    def receive(self, payload: bytes, topic: str, correlation: bytes = b"") -> None:
        self.desk.receive(payload, NOW, reply=Reply(topic, correlation))


def test_an_unsigned_message_takes_over_no_replies_and_is_answered_on_no_topic_of_its_choice(board: Board) -> None:
    replies = Replies(board)
    replies.receive(board.order(op="recalibrate"), "ann")
    for stranger in (b'{"id":"c1"}', b'{"id":"c9"}', board.order(key=None), board.order("eve"), board.order(to="x/y")):
        replies.receive(stranger, "thief")
    replies.receive(board.order("bob", op="rollback"), "bob")
    board.device.jobs[0][1].succeed()
    assert replies.heard == [("ann", "c1", "ACCEPTED"), ("ann", "c1", "SUCCEEDED")]
    assert [result.id for result in board.results if result.status == "REJECTED"] == ["c9", "c1"], "told on its own"
    replies.receive(board.order(op="recalibrate"), "ann/2")
    assert replies.heard[-1] == ("ann/2", "c1", "SUCCEEDED"), "the same command may ask for its answer elsewhere"


def test_what_is_to_come_back_with_a_reply_is_short(board: Board) -> None:
    replies = Replies(board)
    replies.receive(board.order(), "ann", b"x" * 257)
    replies.receive(board.order(id="c2"), "a" * 257)
    assert replies.heard == []
    replies.receive(board.order(id="c3"), "ann", b"x" * 256)
    assert [status for _, _, status in replies.heard] == ["ACCEPTED", "SUCCEEDED"]


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


def test_a_release_for_other_boards_brings_no_model(board: Board, tmp_path: Path) -> None:
    """The mix-and-match attack: the model of another product, validly signed by the maker of both."""
    gates = Releases(Board(tmp_path, product="gate").authority, tmp_path / "releases.json")
    others = Releases(board.authority, tmp_path / "releases.json")
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


def taken_up(releases: Releases, board: Board, key: str, version: int) -> None:
    release = board.keys[key].sign(statement(version=version))
    taken = releases.check(ModelArgs(sha256=SHA, size=10, release=release), NOW)
    assert taken is not None
    releases.take_up(*taken)


def test_a_stolen_release_key_hides_no_version_of_an_honest_one(tmp_path: Path) -> None:
    both = [tmp_path / "rel.pub", tmp_path / "eve.pub"]
    Board(tmp_path)  # it makes the keys
    board = Board(tmp_path, release_keys=both)
    releases = Releases(board.authority, tmp_path / "releases.json")
    taken_up(releases, board, "rel", 5)
    taken_up(releases, board, "eve", 9)
    mended = Board(tmp_path, release_keys=both[:1])
    honest = Releases(mended.authority, tmp_path / "releases.json")
    assert refusal(honest, mended.keys["rel"].sign(statement(version=4))) == "command.rollback"
    taken_up(honest, mended, "rel", 5)


def test_a_disk_that_refused_once_forbids_no_later_release(
    board: Board, releases: Callable[[], Releases], tmp_path: Path
) -> None:
    one, path = releases(), tmp_path / "releases.json"
    path.mkdir()
    for _ in range(2):
        with pytest.raises(AgentError, match=r"releases\.write"):
            taken_up(one, board, "rel", 5)
    path.rmdir()
    taken_up(one, board, "rel", 5)
    assert refusal(releases(), board.keys["rel"].sign(statement(version=4))) == "command.rollback"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 1, "version": "x", "key": "k"}'])
def test_where_the_versions_are_damaged_no_model_is_taken(
    board: Board, releases: Callable[[], Releases], tmp_path: Path, content: str
) -> None:
    (tmp_path / "releases.json").write_text(content)
    damaged = releases()
    assert damaged.damage is not None
    with pytest.raises(AgentError, match=r"releases\.damaged"):
        taken_up(damaged, board, "rel", 5)
    (tmp_path / "releases.json").unlink()
    taken_up(releases(), board, "rel", 5)
