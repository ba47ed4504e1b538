"""The mailbox: the oldest news gives way, state never does."""

from __future__ import annotations

from agent.mqtt.message import Mailbox, Message


def test_the_mailbox_pushes_out_the_oldest_news_and_never_state() -> None:
    mailbox = Mailbox(size=2)
    mailbox.put(Message("status", b"old", retain=True))
    for payload in (b"1", b"2", b"3"):
        mailbox.put(Message("event", payload))
    mailbox.put(Message("status", b"new", retain=True))
    assert mailbox.dropped == 1
    assert [mailbox.pop() for _ in range(len(mailbox))] == [
        Message("status", b"new", retain=True),
        Message("event", b"2"),
        Message("event", b"3"),
    ]
    assert mailbox.pop() is None


def test_unacknowledged_events_go_first_and_old_state_is_not_repeated() -> None:
    mailbox = Mailbox(size=3)
    lost = [Message("event", b"1"), Message("status", b"old", retain=True), Message("event", b"2")]
    mailbox.put(Message("event", b"3"))
    mailbox.put(Message("status", b"new", retain=True))
    mailbox.put_back(lost)
    mailbox.connection_started()
    taken = [mailbox.pop() for _ in range(len(mailbox))]
    assert [message.payload for message in taken if message] == [b"new", b"1", b"2", b"3"]
    mailbox.connection_started()
    assert mailbox.pop() == Message("status", b"new", retain=True)
    assert mailbox.dropped == 0
