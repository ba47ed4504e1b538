"""Anything at all on the topics that a board listens to: it is answered or passed over, in bounded time and memory."""

from __future__ import annotations

import json
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from device import NOW, TOPICS, payload
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.commands.authority import Authority
from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import CommandLog
from agent.commands.settings import admit_desired, parse_desired
from agent.common.errors import AgentError
from agent.config import CommandsConfig
from agent.contract.commands import OPS, CommandResult
from agent.contract.messages import Ack
from agent.contract.signing import new_key
from agent.contract.topics import may_reply_to
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.config import OutboxConfig
from agent.mqtt.message import Reply
from agent.uplink.outbox import Outbox
from agent.uplink.outbox_store import EVENT

_SLOWEST_S = 2.0  # of this thread, not of the disk, for one message; the largest of them take milliseconds

TEXT = st.text(max_size=40)
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**53, 2**63, 10**400, NOW, NOW + 60.0]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
FIELDS = ("id", "op", "args", "issued", "expires", "version", "to", "signature", "values", "epoch", "upto")
ARGS = ("frames", "method", "max_loss", "regime", "values", "level", "sha256", "size", "url", "release")
# Nearly a command: each field is what it should be, or anything.
COMMANDS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["c1", "c2", "a/b", "#", "+", "", "x" * 65, "\u202e"]) | VALUES,
        "op": st.sampled_from([*OPS, "dance"]) | VALUES,
        "args": st.dictionaries(st.sampled_from(ARGS), VALUES, max_size=3) | VALUES,
        "issued": st.just(NOW) | VALUES,
        "expires": st.just(NOW + 60.0) | VALUES,
        "version": st.just(1) | VALUES,
        "to": st.just("fleet/board") | VALUES,
        "signature": st.just("A" * 86 + "==") | VALUES,
        "values": st.dictionaries(TEXT, VALUES, max_size=3) | VALUES,
        "epoch": VALUES,
        "upto": VALUES,
    },
)


def _as_json(document: object) -> bytes:
    return json.dumps(document).encode()  # NaN and Infinity too, which are no JSON


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A good command, into which something fell."""
    content = bytearray(payload(op=draw(st.sampled_from([*OPS]))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(content)


NESTED = st.builds(lambda depth, each: each * depth, st.integers(0, 20_000), st.sampled_from([b"[", b'{"a":', b"[["]))
OWN = "the epoch of the board"
ACKS = st.fixed_dictionaries(
    {"epoch": st.sampled_from([OWN, 0, 1, -1]) | VALUES, "upto": st.integers(-2, 2**53) | VALUES},
    optional={"more": VALUES},
)
PAYLOADS = st.one_of(
    st.binary(max_size=200),
    st.builds(_as_json, COMMANDS),
    st.builds(_as_json, ACKS),
    st.builds(_as_json, VALUES),
    _mutated(),
    NESTED,
)


class Board:
    """All that reads what strangers send; `take` feeds it to each."""

    def __init__(self, folder: Path, outbox: Outbox) -> None:
        self.outbox = outbox
        public = new_key(folder / "ann")[1]
        config = CommandsConfig(operator_keys=(public,))
        self.results: list[CommandResult] = []
        signed = Authority(config, TOPICS, False, lambda: True)
        log = CommandLog(folder / "commands.sqlite", lambda error: pytest.fail(str(error)))
        handlers: dict[str, Any] = dict.fromkeys(OPS, self._done)
        self._desks = [
            CommandDispatcher(handlers, self.results.append, memory=50),
            CommandDispatcher(handlers, self.results.append, memory=50, authority=signed),
            CommandDispatcher(handlers, self.results.append, memory=50, command_log=log),
        ]
        self._parsers: list[Callable[[bytes], object]] = [
            self._take_ack,
            lambda content: parse_desired(*admit_desired(content, None)),
            lambda content: parse_desired(*admit_desired(content, signed)),
        ]

    def _done(self, _args: Any, report: Any) -> None:
        report.succeed()

    def _take_ack(self, content: bytes) -> None:
        """While rows come, and go to the broker: what nobody was ever sent nobody makes it forget."""
        ack = Ack.from_json(content)
        self.outbox.put("event", EVENT, lambda *_: b"{}")
        while (message := self.outbox.pop()) is not None:
            self.outbox.delivered(message)
        self.outbox.acknowledge(ack.epoch, ack.upto)
        assert self.outbox.error is None

    def take(self, content: bytes, retained: bool = False) -> None:
        content = content.replace(f'"{OWN}"'.encode(), str(self.outbox.epoch).encode())
        self.results.clear()
        for desk in self._desks:
            desk.receive(content, NOW, retained, Reply("answers/here"))
        for result in self.results:
            assert CommandResult.from_json(result.to_json()) == result
            assert len(result.to_json()) < MAX_PAYLOAD_BYTES
            assert "/" not in TOPICS.result(result.id).removeprefix("tared/v1/fleet/board/cmd/").removesuffix("/result")
        for parse in self._parsers:
            with suppress(AgentError):
                parse(content)


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """pytest keeps every line of a log."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    folder = tmp_path_factory.mktemp("board")
    with Outbox(folder / "outbox.sqlite", TOPICS, OutboxConfig(confirm="collector")) as outbox:
        yield Board(folder, outbox)


def _in_time(board: Board, content: bytes, retained: bool) -> None:
    """What takes long takes long again; a collection of all the garbage of a hundred thousand examples does not."""
    for _ in range(3):
        begun_s = time.thread_time()
        board.take(content, retained)
        if time.thread_time() - begun_s < _SLOWEST_S:
            return
    pytest.fail(f"slow: {content[:100]!r}, {len(content)} bytes")


@settings(max_examples=100)
@given(content=PAYLOADS, retained=st.booleans())
def test_anything_is_answered_or_passed_over(board: Board, content: bytes, retained: bool) -> None:
    _in_time(board, content, retained)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=100_000)
@given(content=PAYLOADS, retained=st.booleans())
def test_anything_is_answered_or_passed_over_for_long(board: Board, content: bytes, retained: bool) -> None:
    _in_time(board, content, retained)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * MAX_PAYLOAD_BYTES,
        b'{"a":' * (MAX_PAYLOAD_BYTES // 5),
        b'{"id":"c1","n":' + b"9" * (MAX_PAYLOAD_BYTES - 20) + b"}",
        b'{"id":"c1","n":1e' + b"9" * (MAX_PAYLOAD_BYTES - 20) + b"}",
        b'{"id":"c1","n":0.' + b"9" * (MAX_PAYLOAD_BYTES - 20) + b"}",
        b'{"id":"' + b" " * (MAX_PAYLOAD_BYTES - 20) + b'"}',
        b'{"id"' + b" " * (MAX_PAYLOAD_BYTES - 20) + b":",
        b'"id":' * (MAX_PAYLOAD_BYTES // 5),
        b"{" + b",".join(b'"%d":0' % n for n in range(7000)) + b"}",
        payload(args={f"k{n}": n for n in range(3000)}),
        payload(op="set", args={"values": {f"k{n}": n for n in range(3000)}}),
        payload(op="x" * 60_000),
        payload(signature="A" * 60_000),
        b"\x00" * MAX_PAYLOAD_BYTES,
    ],
    ids=range(14),
)
def test_what_is_as_large_as_may_be_is_quickly_read(board: Board, content: bytes) -> None:
    _in_time(board, content, False)


@pytest.mark.trial
def test_a_flood_takes_no_memory(board: Board) -> None:
    """Of new ids, unreadable ones and good ones: what is remembered is bounded."""

    def flood(first: int) -> None:
        for number in range(first, first + 150):
            board.take(payload(id=f"c{number}", op="dance"))
            board.take(payload(id=f"s{number}", args={}))
            board.take(b'{"id": "m%d", ' % number)
            board.take(_as_json({"epoch": OWN, "upto": number}))
            board.take(_as_json({"epoch": number, "upto": number}))

    tracemalloc.start()
    try:
        flood(0)
        before, _ = tracemalloc.get_traced_memory()
        flood(150)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 120_000


@settings(max_examples=75)
@given(
    topic=st.one_of(
        st.text(max_size=30),
        st.sampled_from(["$SYS/", "tared/v1/fleet/board/", "tared", "homeassistant/device/x", ""]).flatmap(
            lambda start: st.builds(lambda end: start + end, st.text(alphabet="ab/+#$\x00", max_size=8))
        ),
    )
)
def test_an_answer_goes_to_no_topic_that_could_do_harm(topic: str) -> None:
    own = TOPICS.result("c1")
    if may_reply_to(topic, own):
        assert topic
        assert not set(topic) & set("+#\x00\n")
        assert topic == own or not topic.startswith(("$", "tared/", "homeassistant/"))
    assert may_reply_to(own, own)
    assert may_reply_to("operators/ann/answers", own)
    assert not may_reply_to(TOPICS.result("c2"), own)
    assert not may_reply_to(TOPICS.command, own)
