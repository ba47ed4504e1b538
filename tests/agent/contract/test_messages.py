"""The contract as types: names, round trips, and commands of every bad kind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.commands.dispatcher import CommandRefused, parse_command
from agent.common.errors import ConfigError
from agent.common.timing import Backoff
from agent.contract.commands import Command, CommandResult, Failure, RecalibrateArgs
from agent.contract.messages import Birth, CameraTelemetry, Document, Event, FidelityReport, Latency, Status, Telemetry
from agent.contract.topics import Topics, check_name
from agent.contract.wire import MAX_DEPTH, MAX_PAYLOAD_BYTES

NOW = 1_700_000_000.0


def command(**changes: Any) -> bytes:
    fields = {"id": "c1", "op": "status", "args": {}, "issued": NOW, "expires": NOW + 60, "version": 1}
    return json.dumps({**fields, **changes}).encode()


def test_topics_follow_the_contract() -> None:
    topics = Topics("plant 7", "Kamera-Süd")
    assert topics.status == "tared/v1/plant 7/Kamera-Süd/status"
    assert topics.command == "tared/v1/plant 7/Kamera-Süd/cmd"
    assert topics.result("c1") == "tared/v1/plant 7/Kamera-Süd/cmd/c1/result"


@pytest.mark.parametrize(
    "name", ["", "+", "a/b", "#", "a\0b", "a\nb", "a\x7f", "\ud800", "x" * 65, "ü" * 33, "a\u202eb"]
)
def test_names_that_no_topic_may_contain(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        check_name(name)
    with pytest.raises(ConfigError, match="rename the device"):
        Topics("fleet", name)


@given(st.text())
def test_a_name_that_passes_is_one_topic_level(name: str) -> None:
    try:
        topic = Topics("fleet", name).status
    except ConfigError:
        return
    assert topic.encode().count(b"/") == 4
    assert not set(topic) & set("+#\0")


@pytest.mark.parametrize(
    "document",
    [
        Status(state="degraded", session="s", boot_id="b", ts=NOW, reason="no job has started yet; wait"),
        Birth(agent_version="0.2.0", hardware={"cpu": "x", "cores": 2, "gpu": None}, engine="abc"),
        Telemetry(
            epoch=1,
            seq=2,
            ts=NOW,
            cameras={
                "north": CameraTelemetry(
                    fps=29.97,
                    up=False,
                    lost="camera.silent",
                    dropped={"busy": 3},
                    latency_ms=Latency(p50=8.0, p99=21.5),
                    drift={"gain_db": 0.4, "alarm": False},
                    fidelity=FidelityReport(estimate=0.98, low=0.95, high=1.0, n=120, empty=7),
                )
            },
            health={"temperature_c": 51.5},
        ),
        Event(epoch=1, seq=4, ts=NOW, kind="error", detail={"detail": {"x": 1}, "self": 1, "to_json": 2}),
        CommandResult(id="c1", status="FAILED", error=Failure(code="engine.build", message="no memory")),
        Command(id="c1", op="recalibrate", args=RecalibrateArgs(frames=64), issued=NOW, expires=NOW + 1, version=1),
    ],
    ids=lambda document: type(document).__name__,
)
def test_documents_survive_the_wire(document: Document) -> None:
    payload = document.to_json()
    if isinstance(document, Command):
        assert parse_command(payload, NOW).command == document
    else:
        assert type(document).from_json(payload) == document


def test_a_reader_ignores_fields_of_a_newer_sender() -> None:
    newer = {"id": "c1", "status": "SUCCEEDED", "eta_s": 12, "result": {"x": 1}}
    assert CommandResult.from_json(json.dumps(newer).encode()).result == {"x": 1}
    assert parse_command(command(priority="high"), NOW).command.op == "status"


def test_the_detail_of_an_event_is_flat_on_the_wire() -> None:
    alarm = Event(epoch=1, seq=3, ts=NOW, kind="alarm", detail={"camera": "north", "gain_db": 6.1})
    flat = {"epoch": 1, "seq": 3, "ts": NOW, "kind": "alarm", "camera": "north", "gain_db": 6.1}
    assert json.loads(alarm.to_json()) == flat
    assert Event.from_json(json.dumps(flat).encode()).detail == {"camera": "north", "gain_db": 6.1}


@pytest.mark.parametrize("name", ["epoch", "seq", "ts", "kind"])
def test_a_detail_takes_no_name_of_the_event(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is the name of another field"):
        Event(epoch=1, seq=1, ts=NOW, kind="alarm", detail={name: 1})


def test_numbers_that_json_has_not_never_leave() -> None:
    with pytest.raises(ValueError, match="finite"):
        Latency(p50=float("nan"), p99=1.0)
    with pytest.raises(ValueError, match="finite"):
        Event(epoch=1, seq=1, ts=NOW, kind="alarm", detail={"gain_db": float("inf")})


@pytest.mark.parametrize(
    ("payload", "code", "command_id"),
    [
        (b"\xff\xfe", "message.malformed", None),
        (b'{"id": "c1", "op": ', "message.malformed", "c1"),
        (b'{"id": "c1", "id": "c2"}', "message.malformed", "c1"),
        (b'{"id": "c1", "expires": NaN}', "message.malformed", "c1"),
        (b'{"id": "c1", "n": ' + b"9" * 5000 + b"}", "message.malformed", "c1"),
        (b'{"id": "a/b", "op"', "message.malformed", None),
        (b"[1, 2]", "message.not_object", None),
        (b'{"id": "c1", "pad": "' + b"x" * MAX_PAYLOAD_BYTES + b'"}', "message.too_large", "c1"),
        (b'{"id": "c1", "args": ' + b"[" * 60_000, "message.too_deep", "c1"),
        (b'{"id": "c1", "args": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "message.too_deep", "c1"),
        (command(op="dance"), "command.unknown_op", "c1"),
        (command(op="recalibrate", args={"frames": 10_001}), "command.args", "c1"),
        (command(args=[]), "command.args", "c1"),
        (command(expires="tomorrow"), "command.invalid", "c1"),
        (command().replace(b"1700000060.0", b"1e999"), "message.malformed", "c1"),
        (command(expires=NOW), "command.expired", "c1"),
    ],
)
def test_bad_commands_are_refused_by_name(payload: bytes, code: str, command_id: str | None) -> None:
    with pytest.raises(CommandRefused) as caught:
        parse_command(payload, NOW)
    error = caught.value
    assert (error.code, error.command_id) == (code, command_id)
    assert error.status == ("EXPIRED" if code == "command.expired" else "REJECTED")
    CommandResult(
        id="c1", status=error.status, error=Failure(code=error.code, message=str(error))
    ).to_json()  # whatever was sent, the answer can be written


def test_backoff_is_jittered_capped_and_starts_over() -> None:
    backoff = Backoff(first_s=1.0, cap_s=8.0, rng=random.Random(7))
    delays = []
    for _ in range(200):
        backoff.reset()
        delays.append([backoff.next_s() for _ in range(12)])
    for ceiling_s, column in zip([1.0, 2.0, 4.0] + [8.0] * 9, zip(*delays, strict=True), strict=True):
        assert 0.0 <= min(column) < 0.1 * ceiling_s
        assert 0.9 * ceiling_s < max(column) <= ceiling_s
