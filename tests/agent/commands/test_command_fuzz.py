"""Arbitrary messages on the topics of a board are answered or ignored, in bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from attack.documents import PAYLOADS, Board
from device import TOPICS
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.contract.topics import may_reply_to
from agent.mqtt.config import OutboxConfig
from agent.uplink.outbox import Outbox


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


@settings(max_examples=100)
@given(content=PAYLOADS, retained=st.booleans())
def test_anything_is_answered_or_ignored(board: Board, content: bytes, retained: bool) -> None:
    board.take(content, retained)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=100_000)
@given(content=PAYLOADS, retained=st.booleans())
def test_anything_is_answered_or_ignored_for_long(board: Board, content: bytes, retained: bool) -> None:
    board.take(content, retained)


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
