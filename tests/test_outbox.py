"""The outbox: the oldest news gives way, state never does."""

from __future__ import annotations

from agent.outbox import Message, Outbox


def test_the_outbox_pushes_out_the_oldest_news_and_never_state() -> None:
    outbox = Outbox(size=2)
    outbox.put(Message("status", b"old", retain=True))
    for payload in (b"1", b"2", b"3"):
        outbox.put(Message("event", payload))
    outbox.put(Message("status", b"new", retain=True))
    assert outbox.dropped == 1
    assert [outbox.take() for _ in range(len(outbox))] == [
        Message("status", b"new", retain=True),
        Message("event", b"2"),
        Message("event", b"3"),
    ]
    assert outbox.take() is None


def test_what_was_not_acknowledged_goes_first_and_old_state_is_not_repeated() -> None:
    outbox = Outbox(size=3)
    lost = [Message("event", b"1"), Message("status", b"old", retain=True), Message("event", b"2")]
    outbox.put(Message("event", b"3"))
    outbox.put(Message("status", b"new", retain=True))
    outbox.put_back(lost)
    outbox.renew()
    taken = [outbox.take() for _ in range(len(outbox))]
    assert [message.payload for message in taken if message] == [b"new", b"1", b"2", b"3"]
    outbox.renew()
    assert outbox.take() == Message("status", b"new", retain=True)
    assert outbox.dropped == 0
