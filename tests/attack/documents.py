"""Messages of strangers by MQTT: to a board's topics, to a collector's, and uploads; and all that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from device import NOW, TOPICS, payload
from hypothesis import strategies as st
from kept import kept_in
from merge_bench import FACTS, counted, frames_of

from agent.commands.authority import Authority
from agent.commands.dispatcher import CommandDispatcher, CommandProgress
from agent.commands.file_transfer import ChunkReceiver, PartialFile
from agent.commands.log import CommandLog
from agent.commands.settings import admit_desired, parse_desired
from agent.common.errors import AgentError
from agent.config import CommandsConfig
from agent.contract.commands import HISTOGRAM_CHUNK_BYTES, MODEL_CHUNK_BYTES, OPS, CommandResult, ModelArgs
from agent.contract.histograms import Upload, read_chunk, read_facts, read_upload, write_upload
from agent.contract.messages import Ack, Birth, Status
from agent.contract.signing import new_key
from agent.contract.wire import MAX_PAYLOAD_BYTES, MessageError
from agent.mqtt.config import OutboxConfig
from agent.mqtt.message import Reply
from agent.mqtt.receive_queue import Arrival
from agent.uplink.outbox import Outbox
from agent.uplink.outbox_store import EVENT
from attack.case import Case, Outcome, damaged, drawn
from fleet.collector.batch import Reader

TEXT = st.text(max_size=40)
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**53, 2**63, 10**400, NOW, NOW + 60.0]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
FIELDS = ("id", "op", "args", "issued", "expires", "version", "to", "signature", "values", "epoch", "upto")
ARGS = sorted({name for op in OPS.values() for name in op.args.model_fields})
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


def as_json(document: object) -> bytes:
    return json.dumps(document).encode()  # NaN and Infinity too, which are no JSON


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good command, into which something fell."""
    op = draw(st.sampled_from([*OPS]))
    content = bytearray(payload(op=op, args=OPS[op].example))
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
    st.builds(as_json, COMMANDS),
    st.builds(as_json, ACKS),
    st.builds(as_json, VALUES),
    mutated(),
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
        log = CommandLog(kept_in(folder))
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
        """An acknowledgement while rows come and go removes no row that was never sent."""
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

    def answers(self, content: bytes, retained: bool) -> Outcome:
        """As `take`: whether every desk has refused it, or a desk took it."""
        self.take(content, retained)
        taken = any(result.status in ("ACCEPTED", "IN_PROGRESS", "SUCCEEDED") for result in self.results)
        return None if taken else "refused cleanly"


DEVICE_TOPIC = b"tared/v1/fleet/board/"
HONEST = {
    b"telemetry": b'{"epoch":7,"seq":3,"ts":1.5,"cameras":{"a":{"fps":1.0,"latency_ms":{"p50":1.0,"p99":2.0}}}}',
    b"event": b'{"epoch":7,"seq":4,"ts":1.5,"kind":"alarm","gain_db":3.0}',
    b"status": Status(state="online", session="s", boot_id="b", ts=1.0).to_json(),
    b"birth": Birth(agent_version="1", engine="e").to_json(),
    b"cmd/c1/result": CommandResult(id="c1", status="SUCCEEDED").to_json(),
}
DIRT = [
    b"\x00",
    b"\\u0000",
    b"\xff",
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"[" * 60,
    b'"',
    b"}",
    b"\n",
    b"9" * 30,
    b"-",
    b"\\",
]


def tampered(chance: Random) -> Arrival:
    """An honest document, cut, spoilt or given other numbers; a few stay as they are."""
    path, payload = chance.choice(list(HONEST.items()))
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(payload))
        payload = payload[:at] + chance.choice(DIRT) + payload[at + chance.randrange(4) :]
    if chance.random() < 0.3:
        payload = payload.replace(b":7,", b":%d," % chance.choice([0, -1, 2**63 - 1, 2**63, 10**30]))
    return Arrival(DEVICE_TOPIC + path, payload)


UPLOAD = write_upload(FACTS, counted(frames_of(0, values=500)))


def _collected(arrivals: list[Arrival]) -> Outcome:
    batch = Reader().read(arrivals)
    known = len(batch.entries) + len(batch.statuses) + len(batch.births) + len(batch.results)
    assert known + len(batch.refused) <= 2 * len(arrivals)
    return "refused cleanly" if batch.refused else None


def _uploaded(content: bytes) -> Outcome:
    try:
        read_facts(content)
        dict(read_upload(content))
    except MessageError:
        return "refused cleanly"
    return None


def _histogram_chunk(name: str, number: str, content: bytes) -> Outcome:
    try:
        read_chunk(name, number, content)
    except MessageError:
        return "refused cleanly"
    return None


def _model_chunks(chunks: list[tuple[str, bytes]], path: Path) -> Outcome:
    """The file grows by what was asked for alone, to its size and not beyond."""
    path.unlink(missing_ok=True)
    args = ModelArgs(sha256="ab" * 32, size=2 * MODEL_CHUNK_BYTES + 7)
    file = PartialFile(path, args, CommandProgress("c1", lambda _: None))
    try:
        receiver = ChunkReceiver(file)
        for topic, content in chunks:
            receiver.receive(topic, content)
        assert file.size <= args.size
        assert not receiver.is_complete or not file.verify()
    finally:
        file.close()
    return None


def board_cases(rng: Random, folder: Path) -> Iterator[Case]:
    """Commands, desired documents and acknowledgements, to boards with keys, with a log, and with neither."""
    (folder / "board").mkdir(exist_ok=True)
    with Outbox(folder / "board/outbox.sqlite", TOPICS, OutboxConfig(confirm="collector")) as outbox:
        board = Board(folder / "board", outbox)
        honest = [payload(id=f"h{number}", op=rng.choice(("status", "rollback", "cancel"))) for number in range(4)]
        for content in (*drawn(PAYLOADS, rng, 60), *honest):
            yield Case("a document for a board", partial(board.answers, content, rng.random() < 0.2))


def collector_cases(rng: Random, _folder: Path) -> Iterator[Case]:
    """Tampered messages of boards."""
    for _ in range(60):
        yield Case(
            "documents for a collector", partial(_collected, [tampered(rng) for _ in range(rng.choice((1, 1, 8)))])
        )


def upload_cases(rng: Random, folder: Path) -> Iterator[Case]:
    """Histograms for a merge, and a model's chunks for a board."""
    sound = Upload(rng.randbytes(HISTOGRAM_CHUNK_BYTES + 1))
    numbers = ("0", "1", "-1", "0x0", "9" * 5000, "", "\u00b2", "1.0")
    for _ in range(12):
        fault, content = damaged(rng, UPLOAD)
        yield Case(f"an upload, {fault}", partial(_uploaded, content))
        fault, content = damaged(rng, sound.chunk(0))
        name = rng.choice((sound.name, "0" * 16, "", "../x"))
        yield Case(f"a chunk of histograms, {fault}", partial(_histogram_chunk, name, rng.choice(numbers), content))
    for _ in range(6):
        chunks = [
            (
                f"tared/v1/a/b/model/{rng.choice(('ab' * 32, 'ab' * 32, 'x'))}/{rng.choice((0, 0, 1, 1, 2, -1))}",
                rng.randbytes(rng.choice((MODEL_CHUNK_BYTES, MODEL_CHUNK_BYTES, 7, 0, MODEL_CHUNK_BYTES + 1))),
            )
            for _ in range(12)
        ]
        yield Case("a model's chunks", partial(_model_chunks, chunks, folder / "part"))
