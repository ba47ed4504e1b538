"""Reports have ranks: alarms survive an outbox that was full for a week."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from device import TOPICS

from agent.common.errors import AgentError
from agent.contract.events import EventKind
from agent.contract.messages import Birth
from agent.mqtt.config import OutboxConfig
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.uplink.reporter import Reporter

NEWS: EventKind = "job"


def left_of(folder: Path, kinds: list[EventKind]) -> Counter[str]:
    """Return the rows by kind that a small outbox keeps of these kinds, and of far more news and samples after them."""
    path = folder / "outbox.sqlite"
    with Outbox(path, TOPICS, OutboxConfig(bytes=100_000, commit_s=0.05, confirm="collector")) as outbox:
        reporter = Reporter(cast(MqttLink, SimpleNamespace(outbox=outbox, drops={})), Birth(agent_version="0"))
        for kind in kinds:
            if kind == "error":
                reporter.error(AgentError("store.write", "a full disk", "room", "make some"))
            else:
                reporter.event(kind)
        for number in range(2000):
            reporter.event(NEWS, step=f"{number}")
            reporter.telemetry({})
    with closing(sqlite3.connect(path)) as db:
        return Counter(dict(db.execute("SELECT kind, count(*) FROM rows GROUP BY kind").fetchall()))


def test_alarms_outlive_a_flood_of_news_and_samples(tmp_path: Path) -> None:
    alarms: list[EventKind] = ["alarm", "error", "fidelity", "view", "swap", "commit", "rollback"]
    left = left_of(tmp_path, [*alarms, "regime"])
    assert [kind for kind in alarms if left[kind] != 1] == []
    assert left["regime"] == 0
    assert left["telemetry"] < left[NEWS] < 2000


def test_a_birth_is_sent_again_only_when_it_has_changed() -> None:
    sent: list[Birth] = []
    reporter = Reporter(cast(MqttLink, SimpleNamespace(send=sent.append)), Birth(agent_version="0"))
    for _ in range(2):
        reporter.serves("night", "scales", "int8", 0.5, ["night"])
    reporter.keeps_regimes(["night", "day"])
    reporter.keeps_regimes(["day", "night"])
    assert [birth.regimes for birth in sent] == [["night"], ["day", "night"]]
    assert {(birth.engine, birth.precision, birth.int8_macs_share) for birth in sent} == {("night", "int8", 0.5)}
    reporter.serves("float", None, "fp32", 0.0)
    assert (sent[-1].engine, sent[-1].calibration, sent[-1].precision, sent[-1].regimes) == ("float", None, "fp32", [])
