"""An upload of histograms, its chunks, and their way out: exact, one at a time, closed to what no board sends."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from merge_bench import FACTS, counted, frames_of

from agent.contract.commands import HISTOGRAM_CHUNK_BYTES, MAX_HISTOGRAM_CHUNKS
from agent.contract.histograms import Facts, Upload, read_chunk, read_facts, read_upload, write_upload
from agent.contract.topics import Topics
from agent.contract.wire import MAX_PAYLOAD_BYTES, MessageError
from agent.mqtt.message import Message
from agent.uplink.link import UploadSource

HISTOGRAMS = counted(frames_of(0, values=500))
CONTENT = write_upload(FACTS, HISTOGRAMS)
TOPICS = Topics("fleet", "board")


def test_histograms_are_read_as_written_and_equal_ones_have_equal_bytes() -> None:
    assert read_facts(CONTENT) == FACTS
    assert dict(read_upload(CONTENT)) == HISTOGRAMS
    assert write_upload(FACTS, dict(HISTOGRAMS)) == CONTENT


def test_facts_may_be_longer_than_a_message_for_they_have_the_names_of_thousands_of_tensors() -> None:
    names = [f"/model.{number}/cv{number % 3}/conv/Conv_output_0_with_a_long_name" for number in range(3000)]
    facts = FACTS.model_copy(update={"shared": [names[at : at + 2] for at in range(0, len(names), 2)]})
    assert len(facts.to_json()) > 2 * MAX_PAYLOAD_BYTES
    assert read_facts(write_upload(facts, HISTOGRAMS)) == facts
    endless = FACTS.model_copy(update={"shared": [names * 30]})
    with pytest.raises(MessageError, match=r"message\.too_large"):
        read_facts(write_upload(endless, HISTOGRAMS))


def test_an_upload_contains_no_time_place_or_frame() -> None:
    assert set(json.loads(FACTS.to_json())) <= {
        "model", "observed", "method", "frames", "preprocessing", "shared", "merged"
    }  # fmt: skip


@given(st.binary(max_size=200), st.integers(0, len(CONTENT)))
def test_foreign_and_damaged_content_is_refused(foreign: bytes, cut: int) -> None:
    for content in (foreign, CONTENT[:cut] + foreign + CONTENT[cut + 1 :], CONTENT + b"\0" + foreign):
        if content == CONTENT:
            continue
        try:
            facts, histograms = read_facts(content), dict(read_upload(content))
        except MessageError:
            continue
        # Names and facts have no check of their own: the hash of the whole upload is theirs.
        assert list(histograms.values()) == list(HISTOGRAMS.values()), "no count that somebody changed"
        assert isinstance(facts, Facts)


def test_a_repeated_tensor_and_no_tensor_are_refused() -> None:
    record = write_upload(FACTS, {"conv1": HISTOGRAMS["conv1"]})
    bare = write_upload(FACTS, {})
    for content, found in ((record + record[len(bare) :], "twice"), (bare, "no tensor")):
        with pytest.raises(MessageError, match=found):
            list(read_upload(content))


def test_chunks_are_of_the_upload_that_they_name() -> None:
    content = np.random.default_rng(0).bytes(2 * HISTOGRAM_CHUNK_BYTES + 7)
    upload = Upload(content)
    pieces = [read_chunk(upload.name, str(number), upload.chunk(number)) for number in range(upload.total)]
    assert b"".join(piece for _, _, piece in pieces) == content
    assert {(head.sha256, head.total) for head, _, _ in pieces} == {(upload.sha256, 3)}
    assert max(len(upload.chunk(number)) for number in range(3)) < 48 * 1024


SOUND = Upload(bytes(HISTOGRAM_CHUNK_BYTES + 1))


@pytest.mark.parametrize(
    ("name", "number", "payload"),
    [
        ("0" * 16, "0", SOUND.chunk(0)),
        (SOUND.name, "²", SOUND.chunk(0)),
        (SOUND.name, "0", SOUND.chunk(1)),
        (SOUND.name, "1", SOUND.chunk(1)[:-1]),
        (SOUND.name, "0", b""),
        (SOUND.name, "0", b"{" * 600 + b"\n"),
        (SOUND.name, "0", b"no JSON\n" + bytes(HISTOGRAM_CHUNK_BYTES)),
        (SOUND.name, "0", SOUND.chunk(0).replace(b'"total":2', b'"total":%d' % (MAX_HISTOGRAM_CHUNKS + 1))),
    ],
)
def test_hostile_chunks_are_refused(name: str, number: str, payload: bytes) -> None:
    with pytest.raises(MessageError):
        read_chunk(name, number, payload)


class Sending:
    """A source at work, and its reports."""

    def __init__(self) -> None:
        self.source = UploadSource(TOPICS)
        self.reported: list[tuple[int, str]] = []
        self.upload = Upload(bytes(3 * HISTOGRAM_CHUNK_BYTES))
        self.source.start(self.upload, range(3), lambda left, refusal: self.reported.append((left, refusal)))

    def take(self, number: int) -> Message:
        message = self.source.pop()
        assert message is not None
        assert message.topic == TOPICS.histogram_chunk(self.upload.name, number)
        return message


def test_chunks_are_sent_singly() -> None:
    sending = Sending()
    for number in range(3):
        message = sending.take(number)
        assert sending.source.pop() is None, "telemetry never waits for two"
        sending.source.delivered(message)
    assert sending.source.pop() is None
    assert sending.reported == [(2, ""), (1, ""), (0, "")]
    assert len(sending.source) == 0


def test_the_chunk_of_a_lost_connection_is_sent_again() -> None:
    sending = Sending()
    lost = sending.take(0)
    sending.source.put_back([lost])
    sending.source.connection_started()
    sending.source.delivered(sending.take(0))
    sending.source.delivered(sending.take(1))
    assert sending.reported == [(2, ""), (1, "")]


def test_a_refused_chunk_ends_the_upload() -> None:
    for for_good, why in ((True, "its longest message"), (False, "its access rules")):
        sending = Sending()
        sending.source.refused(sending.take(0), for_good)
        assert sending.source.pop() is None
        assert sending.reported == [(0, why)]


def test_a_chunk_of_an_upload_that_has_ended_is_no_news() -> None:
    sending = Sending()
    old = sending.take(0)
    sending.source.start(sending.upload, [2], lambda left, refusal: sending.reported.append((left, refusal)))
    sending.source.delivered(old)
    assert sending.reported == []
    sending.source.end()
    assert sending.source.pop() is None
