"""A socket that takes out publications: however its bytes are cut, the same come out, and the rest goes on."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.common.errors import AgentError
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.bulk_receive import Arrival, BulkSocket, PubackPolicy, ReceiveQueue

PINGRESP, SUBACK = b"\xd0\x00", b"\x90\x03\x00\x01\x01"


class Wire:
    """Hands out these pieces, one for each read; takes so many bytes of each write."""

    def __init__(self, pieces: list[bytes], takes: int = 1 << 20) -> None:
        self.pieces, self.takes, self.written = pieces, takes, b""

    def recv(self, most: int) -> bytes:
        if not self.pieces:
            raise BlockingIOError
        piece = self.pieces.pop(0)
        assert len(piece) <= most
        return piece

    def send(self, data: bytes) -> int:
        if self.takes == 0:
            raise BlockingIOError
        self.written += bytes(data[: self.takes])
        return len(data[: self.takes])


def length(value: int) -> bytes:
    found = b""
    while True:
        value, low = value >> 7, value & 0x7F
        found += bytes([low | (0x80 if value else 0)])
        if not value:
            return found


def publication(topic: bytes, payload: bytes, packet_id: int, properties: bytes | None) -> bytes:
    """packet_id: 0 for QoS 0."""
    body = len(topic).to_bytes(2, "big") + topic + (packet_id.to_bytes(2, "big") if packet_id else b"")
    body += (length(len(properties)) + properties if properties is not None else b"") + payload
    return bytes([0x30 | (0x02 if packet_id else 0)]) + length(len(body)) + body


def read_all(sock: BulkSocket) -> bytes:
    others = b""
    while sock._sock.pieces or sock.pending():
        with suppress(BlockingIOError):
            others += sock.recv(3)
    return others


@given(st.data())
def test_however_it_is_cut(data: st.DataObject) -> None:
    properties = data.draw(st.none() | st.binary(max_size=200))
    messages = data.draw(st.lists(st.tuples(st.binary(max_size=140), st.binary(max_size=300), st.integers(0, 65_535))))
    between = data.draw(
        st.lists(st.sampled_from([b"", PINGRESP, SUBACK]), min_size=len(messages), max_size=len(messages))
    )
    stream = b"".join(publication(*each, properties) + other for each, other in zip(messages, between, strict=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    sock = BulkSocket(Wire(pieces), has_properties=properties is not None)
    assert read_all(sock) == b"".join(between)
    assert sock.pop() == [Arrival(topic, payload) for topic, payload, _ in messages]
    sock.acknowledge(len(messages))
    assert sock._sock.written == b"".join(b"\x40\x02" + each[2].to_bytes(2, "big") for each in messages if each[2])


def test_one_that_is_too_long_is_cut_while_it_comes_and_never_held_whole() -> None:
    long = publication(b"t", bytes(5_000_000), 7, None) + publication(b"t", b"after", 8, None)
    pieces = [long[at : at + 100_000] for at in range(0, len(long), 100_000)]
    sock = BulkSocket(Wire(pieces), has_properties=False)
    while sock._sock.pieces:
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        assert len(sock._unread) <= MAX_PAYLOAD_BYTES + 200_000
    assert [len(each.payload) for each in sock.pop()] == [MAX_PAYLOAD_BYTES + 1, 5]


def test_what_cannot_be_written_waits_in_its_order() -> None:
    wire = Wire([publication(b"t", b"x", 1, None)], takes=0)
    sock = BulkSocket(wire, has_properties=False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    assert sock.send(b"a packet of the client's") == 24
    sock.pop()
    sock.acknowledge(1)
    assert sock.wants_write
    wire.takes = 5
    sock.flush()
    assert wire.written == b"a packet of the client's\x40\x02\x00\x01"
    assert not sock.wants_write


@pytest.mark.parametrize("stream", [b"\x30\xff\xff\xff\xff\x01", b"\x32\x04\x00\x01tx", b"\x32\x02\x00\x09"])
def test_a_broken_packet_ends_the_connection(stream: bytes) -> None:
    with pytest.raises((AgentError, IndexError)):
        BulkSocket(Wire([stream]), has_properties=True).recv(1)


def test_a_receive_queue_gives_what_came_in_its_order_and_reports_room() -> None:
    queue, reported = ReceiveQueue(most_bytes=500), list[str]()
    queue.on_progress = lambda: reported.append("room")
    batches = [[Arrival(b"t", b"%d" % number)] * 2 for number in range(3)]
    for batch in batches:
        assert queue.has_room is (batch is not batches[2])
        queue.put(batch)
    assert not queue.has_room
    assert queue.pop(1, 0.0, 0.0) == batches[0]
    assert reported == []
    assert queue.pop(1, 0.0, 0.0) == batches[1]
    assert reported == ["room"]
    assert queue.pop(1 << 20, 0.0, 0.0) == batches[2]
    assert queue.pop(1 << 20, 0.0, 0.0) == []


def test_what_an_earlier_connection_has_put_into_a_queue_is_acknowledged_on_no_other() -> None:
    queue = ReceiveQueue(1 << 20)
    lost, now = (Wire([publication(b"t", b"%d" % number, 7, None)]) for number in (1, 2))
    for wire in (lost, now):
        bulk, policy = BulkSocket(wire, has_properties=False), PubackPolicy(queue, holds=True)
        with suppress(BlockingIOError):
            bulk.recv(1)
        policy.update(bulk)
    assert queue.pop(1 << 20, 0.0, 0.0) == [Arrival(b"t", b"1"), Arrival(b"t", b"2")]
    for settled, acknowledged in ((1, b""), (1, b"\x40\x02\x00\x07")):
        queue.confirm(settled)
        policy.update(bulk)
        assert (lost.written, now.written) == (b"", acknowledged)


def test_what_is_withheld_is_acknowledged_once_and_when_it_is_settled() -> None:
    """A broker that is tired of waiting says it again, and one that was told uses the number for another."""
    first, other = publication(b"t", b"1", 7, None), publication(b"t", b"2", 0x4002, None)
    again = bytes([first[0] | 0x08]) + first[1:]
    wire = Wire([other + first, again + again])
    sock = BulkSocket(wire, has_properties=False)
    for expected in (2, 0):
        with suppress(BlockingIOError):
            sock.recv(1)
        assert len(sock.pop()) == expected
    sock.acknowledge(1)  # what was taken at once is acknowledged at once
    assert wire.written == b""
    sock.acknowledge(2)
    assert wire.written == b"\x40\x02\x40\x02\x40\x02\x00\x07"
    wire.pieces = [again]
    with suppress(BlockingIOError):
        sock.recv(1)
    assert len(sock.pop()) == 1


def test_connections_that_are_lost_while_nobody_takes_do_not_fill_the_memory() -> None:
    queue = ReceiveQueue(most_bytes=1000)
    for _ in range(50):
        wire = Wire([publication(b"t", bytes(600), 7, None)])
        bulk, policy = BulkSocket(wire, has_properties=False), PubackPolicy(queue, holds=True)
        with suppress(BlockingIOError):
            bulk.recv(1)
        policy.update(bulk)
    taken = queue.pop(1 << 20, 0.0, 0.0)
    assert len(taken) <= 2
    queue.confirm(len(taken))
    policy.update(bulk)
    assert wire.written == b"\x40\x02\x00\x07"
