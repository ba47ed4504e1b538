"""Results on the topic `detections`: the newest, so many a second, and none kept for a broker that is away."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from bench import strict
from brokers import RealBroker, Watcher, eventually, on_the_air
from fake_broker import FakeBroker, admit, packet_from
from results_bench import CONFIG, detections, line, served
from turned_clock import TurnedClock
from worlds import make_world

from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.contract.wire import MAX_PAYLOAD_BYTES, read_object
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message, Newest
from agent.results.mqtt_output import ResultsTopic, result_payload
from agent.results.writer import ResultsWriter
from agent.vision.tasks.raw import RawOutputs
from agent.vision.tasks.segment import LabelMap

TOPICS = Topics("default", "board")


def test_the_newest_is_published_so_many_times_a_second() -> None:
    clock, sent = TurnedClock(), list[bytes]()
    topic = ResultsTopic(sent.append, 4.0, clock)
    for number in range(64):  # two seconds at 32 frames per second
        topic.add(line(number))
        topic.tick()
        clock.turn(1 / 32)
    numbers = [json.loads(each)["frame"] for each in sent]
    assert numbers == list(range(0, 64, 8))


def test_the_last_of_a_burst_follows_when_its_time_comes() -> None:
    clock, sent = TurnedClock(), list[bytes]()
    topic = ResultsTopic(sent.append, 0.5, clock)
    topic.add(line(0))
    assert topic.tick() > 2.0
    topic.add(line(1))
    topic.add(line(2))
    assert topic.tick() == 2.0
    clock.turn(2.0)
    topic.tick()
    topic.tick()
    assert [json.loads(each)["frame"] for each in sent] == [0, 2]


def test_a_document_is_what_the_file_has() -> None:
    sent: list[bytes] = []
    topic = ResultsTopic(sent.append, 1.0)
    topic.add(line(3, detections(0.5, 0.9)))
    topic.tick()
    assert sent == [line(3, detections(0.5, 0.9)).encoded.rstrip()]


def test_a_document_that_is_too_long_keeps_the_surest_and_counts_the_others() -> None:
    scores = np.random.default_rng(0).permutation(5000) / 5000.0
    document = line(3, detections(*scores)).document
    cut = result_payload(document)
    assert len(cut) <= MAX_PAYLOAD_BYTES < len(cut) + 300
    found = read_object(cut)
    kept = [each["score"] for each in found["detections"]]
    assert kept == sorted(scores.tolist(), reverse=True)[: len(kept)]
    assert found["left_out"] == 5000 - len(kept)
    assert found["frame"] == 3


def test_a_document_that_just_fits_is_whole() -> None:
    document = line(3, detections(0.5, 0.9)).document
    length = len(json.dumps(document))
    assert "left_out" not in strict(result_payload(document, length).decode() + "\n")
    cut = strict(result_payload(document, length - 1).decode() + "\n")
    assert (cut["left_out"], [each["score"] for each in cut["detections"]]) == (1, [pytest.approx(0.9)])
    assert json.loads(result_payload(document, 10))["left_out"] == 2


def test_raw_outputs_that_are_too_long_are_left_out() -> None:
    cut = read_object(result_payload(line(3, RawOutputs({"y": np.zeros((1, 20_000), np.float32)})).document))
    assert (cut["outputs"], cut["left_out"]) == ({}, 1)


def test_the_largest_segments_of_a_map_that_is_too_long_stay() -> None:
    noise = np.random.default_rng(0).integers(0, 3, (60, 80)).astype(np.int16)
    noise[:30] = 1
    document = line(3, LabelMap(noise, (60, 80))).document
    length = len(json.dumps(document))
    cut = read_object(result_payload(document, length - 1))
    assert (cut["left_out"], cut["segments"][0]["class"], len(cut["segments"])) == (1, 1, 2)


@pytest.mark.broker
def test_a_broker_that_was_away_receives_no_old_results(any_broker: RealBroker) -> None:
    with (
        on_the_air(any_broker.endpoint, TOPICS, Birth(agent_version="0")) as link,
        ResultsWriter(CONFIG, [ResultsTopic(link.send_detections, 60.0)]) as writer,
    ):
        assert writer.dropped == {}
        eventually(lambda: link.connected)
        with Watcher(any_broker.endpoint) as watcher:
            writer.offer(served(0))
            assert watcher.expect(TOPICS.detections)["frame"] == 0
            assert {m.retain for m in watcher.seen if m.topic == TOPICS.detections} == {False}
        any_broker.stop()
        eventually(lambda: not link.connected)
        for number in range(1, 50):
            writer.offer(served(number))
        writer.flush()
        any_broker.start()
        with Watcher(any_broker.endpoint) as watcher:
            eventually(lambda: link.connected)
            writer.offer(served(50))
            assert watcher.expect(TOPICS.detections)["frame"] == 50


def test_a_result_that_waits_for_a_connection_is_gone_with_it() -> None:
    newest = Newest()
    newest.put(Message("detections", b"1", qos=0))
    newest.put(Message("detections", b"2", qos=0))
    assert len(newest) == 1
    newest.connection_started()
    assert newest.pop() is None


@pytest.mark.slow
def test_nothing_piles_up_before_a_network_that_stands_still() -> None:
    newest = Newest()
    with (
        FakeBroker() as broker,
        MqttClient(broker.endpoint, "board", SessionOptions(subscriptions=["a"], sources=[newest])) as client,
        broker.connection() as connection,
    ):
        admit(connection)
        eventually(lambda: client.connected)
        for number in range(400):  # 24 MB, and the kernel takes a few
            newest.put(Message("detections", bytes(60_000) + bytes([number % 100]), qos=0))
            client.wake()
            eventually(lambda: not len(newest))
        connection.settimeout(0.5)
        received: list[bytes] = []

        def is_current() -> bool:
            newest.put(Message("detections", b"again", qos=0))
            client.wake()
            with contextlib.suppress(TimeoutError):
                received.append(packet_from(connection))
            return bool(received) and received[-1].endswith(b"again")

        eventually(is_current, 60.0)
        assert len(received) < 300


@pytest.mark.slow
@pytest.mark.broker
def test_the_daemon_publishes_what_it_sees(tmp_path: Path, any_broker: RealBroker) -> None:
    mqtt = {"host": any_broker.host, "port": any_broker.port}
    world = make_world(tmp_path, lambda _: 0.5, 100.0, results={"mqtt_per_s": 5.0}, mqtt=mqtt)
    with Watcher(any_broker.endpoint) as watcher, world.running():
        first, second = (watcher.expect(TOPICS.detections) for _ in range(2))
    assert {*first} == {"frame", "ts", "camera", "engine", "latency_ms", "class", "label", "score"}
    assert first["frame"] < second["frame"]
