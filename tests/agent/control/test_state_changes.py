"""Each finding of the observer is reported once, as an event."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from raising_world import config_of, observer_state

from agent.contract.events import EventKind
from agent.contract.messages import Birth
from agent.control.events import StateChangeReporter
from agent.monitoring.audit import Mismatch
from agent.monitoring.causes import Change, Explanation, Remedy
from agent.monitoring.class_losses import LossExample, LostClass
from agent.uplink.reporter import Reporter


class Events(Reporter):
    """Keeps what is reported."""

    def __init__(self) -> None:
        super().__init__(None, Birth(agent_version="0"))
        self.seen: list[dict[str, Any]] = []

    def event(self, kind: EventKind, level: int = logging.INFO, /, **detail: Any) -> None:
        super().event(kind, level, **detail)
        self.seen.append({"kind": kind, **detail})


def test_a_lost_class_is_named_once_for_each_engine() -> None:
    config, events = config_of(), Events()
    changes = StateChangeReporter(events, [], config)
    lost = LostClass(1, 0.4, 0.1, 2, (LossExample(7, 0.7, 2), LossExample(9, 0.9, None)))
    states = {"front": replace(observer_state(config, (0.9, 1.0, 9)), lost_classes=(lost,))}
    for _ in range(2):
        changes.report_changes(states)
    (event,) = events.seen
    assert (event["kind"], event["camera"], event["name"], event["instead"]) == ("class", "front", "b", "c")
    assert (event["loss"], event["tolerance"]) == (0.4, 0.1)
    examples = [{"frame": 7, "ts": 0.7, "served": "c"}, {"frame": 9, "ts": 0.9, "served": None}]
    assert event["examples"] == examples
    changes.reset()
    changes.report_changes(states)
    assert len(events.seen) == 2


def test_the_causes_of_an_alarm_are_reported_once_they_are_known() -> None:
    config, events = config_of(), Events()
    changes = StateChangeReporter(events, [], config)
    why = Explanation((Change("light", -1.26),), (Remedy("recalibrate", 7.123), Remedy("retrain", None, "unsure")))
    for known in (None, why, why, None):
        changes.report_changes({"front": replace(observer_state(config, (0.9, 1.0, 9)), explanation=known)})
    (event,) = events.seen
    assert (event["kind"], event["changes"]) == ("cause", [{"cause": "light", "octaves": -1.26}])
    assert event["remedies"] == [
        {"remedy": "recalibrate", "gain_db": 7.12, "gain": None, "detail": None},
        {"remedy": "retrain", "gain_db": None, "gain": None, "detail": "unsure"},
    ]


def test_a_wrong_reference_is_reported_in_numbers_that_json_has() -> None:
    events = Events()
    infinite = Mismatch(float("inf"), "out", float("-inf"), 50.0, "front", 3, 0.1, "conv1", is_in_batch=True)
    StateChangeReporter(events, [], config_of()).report_mismatch(infinite)
    (event,) = events.seen
    assert (event["kind"], event["output"], event["tensor"], event["in_batch"]) == ("reference", "out", "conv1", True)
    assert (event["sqnr_db"], event["allowed_db"]) == (-999.0, 50.0)
