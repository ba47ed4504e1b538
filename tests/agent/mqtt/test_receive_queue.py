"""A queue between the MQTT thread and its reader, and the acknowledgement of its messages."""

from __future__ import annotations

from agent.mqtt.acknowledgements import OrderedAcks
from agent.mqtt.receive_queue import Arrival, PubackPolicy, ReceiveQueue


class Acknowledged(list[int]):
    """Packet ids, in the order of their acknowledgements."""

    def __call__(self, packet_id: int, qos: int) -> None:
        assert qos == 1
        self.append(packet_id)


class Connected(PubackPolicy):
    """The policy of a connection that acknowledges at each turn."""

    def __init__(self, queue: ReceiveQueue, holds: bool, acknowledged: Acknowledged) -> None:
        self.acks = OrderedAcks(acknowledged)
        super().__init__(queue, holds, self.acks)

    def update(self) -> None:
        super().update()
        self.acks.send()


def receive(policy: PubackPolicy, *packet_ids: int) -> None:
    for packet_id in packet_ids:
        policy.receive(Arrival(b"t", b"%d" % packet_id), packet_id, 1)
    policy.update()


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


def test_without_a_hold_all_is_acknowledged_in_its_order_as_soon_as_there_is_room() -> None:
    queue, acknowledged = ReceiveQueue(most_bytes=500), Acknowledged()
    policy = Connected(queue, holds=False, acknowledged=acknowledged)
    receive(policy, 2, 1)
    assert acknowledged == [2, 1]
    receive(policy, 3)
    policy.receive(Arrival(b"t", b"of QoS 0"), 0, 0)
    policy.update()
    assert acknowledged == [2, 1]
    assert [each.payload for each in queue.pop(1 << 20, 0.0, 0.0)] == [b"2", b"1", b"3"]
    policy.update()
    assert acknowledged == [2, 1, 3]


def test_a_message_is_acknowledged_on_no_later_connection() -> None:
    queue, lost, now = ReceiveQueue(1 << 20), Acknowledged(), Acknowledged()
    for acknowledged in (lost, now):
        policy = Connected(queue, holds=True, acknowledged=acknowledged)
        receive(policy, 7)
    assert len(queue.pop(1 << 20, 0.0, 0.0)) == 2
    for expected in ([], [7]):
        queue.confirm(1)
        policy.update()
        assert (lost, now) == ([], expected)


def test_a_withheld_message_is_acknowledged_once_it_is_confirmed() -> None:
    """A broker that is tired of waiting sends it again, and uses its number for another once it was acknowledged."""
    queue, acknowledged = ReceiveQueue(1 << 20), Acknowledged()
    policy = Connected(queue, holds=True, acknowledged=acknowledged)
    receive(policy, 9, 7, 7, 7)
    assert [each.payload for each in queue.pop(1 << 20, 0.0, 0.0)] == [b"9", b"7"]
    for expected in ([9], [9, 7]):
        queue.confirm(1)
        policy.update()
        assert acknowledged == expected
    receive(policy, 7)
    assert len(queue.pop(1 << 20, 0.0, 0.0)) == 1


def test_lost_connections_do_not_fill_the_memory_while_the_reader_waits() -> None:
    queue = ReceiveQueue(most_bytes=1000)
    for _ in range(50):
        acknowledged = Acknowledged()
        policy = Connected(queue, holds=True, acknowledged=acknowledged)
        policy.receive(Arrival(b"t", bytes(600)), 7, 1)
        policy.update()
    taken = queue.pop(1 << 20, 0.0, 0.0)
    assert len(taken) <= 2
    queue.confirm(len(taken))
    policy.update()
    assert acknowledged == [7]
