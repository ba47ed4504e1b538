"""Report what the daemon does: telemetry and events, numbered by the outbox for MQTT; events also in the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import JsonValue

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.contract.events import ALARM_KINDS, EventKind
from agent.contract.messages import Birth, CameraTelemetry, Event, LabelledAccuracy, Telemetry
from agent.system.board import health
from agent.uplink.link import MqttLink
from agent.uplink.outbox import TELEMETRY
from agent.uplink.outbox_store import ALARM, EVENT, SAMPLE
from calibrate.errors import TaredError

log = logging.getLogger(__package__)


@dataclass
class EventCounts:
    """Counts what was reported, for metrics.

    Args:
        events: By kind.
        errors: By code.
        alarms: Drift alarms by camera.
        jobs: By trigger, step and error code, also those that go on; the code is empty unless the job failed.
    """

    events: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    alarms: Counter[str] = field(default_factory=Counter)
    jobs: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def note(self, kind: str, detail: Mapping[str, JsonValue]) -> None:
        """Count an event."""
        self.events[kind] += 1
        code = str(detail.get("code", ""))
        if kind == "error":
            self.errors[code] += 1
        elif kind == "alarm":
            self.alarms[str(detail.get("camera"))] += 1
        if kind in ("job", "error") and "trigger" in detail and "step" in detail:
            self.jobs[str(detail["trigger"]), str(detail["step"]), code] += 1

    def copy(self) -> EventCounts:
        """Return the counts so far; later events do not change them."""
        return EventCounts(self.events.copy(), self.errors.copy(), self.alarms.copy(), self.jobs.copy())


class Reporter:
    """Puts telemetry and events into the link's outbox. Without a link, events still go to the log.

    counts: of the events so far.
    """

    def __init__(self, link: MqttLink | None, birth: Birth, clock: Clock = SYSTEM_CLOCK) -> None:
        """clock: The board's."""
        self.counts = EventCounts()
        self._link = link
        self._birth = birth
        self._clock = clock

    def health(self) -> Mapping[str, JsonValue]:
        """Return the board's health, as telemetry reports it."""
        return health()

    def serves(
        self,
        engine: str,
        calibration: str | None,
        precision: str | None = None,
        int8_macs_share: float | None = None,
        regimes: Iterable[str] = (),
    ) -> None:
        """Announce what is in service now, by the ids of artefact and calibration; the rest as in `Birth`."""
        self._announce(
            engine=engine,
            calibration=calibration,
            precision=precision,
            int8_macs_share=int8_macs_share,
            regimes=sorted(regimes),
        )

    def keeps_regimes(self, artefacts: Iterable[str]) -> None:
        """Announce which engines are kept for a light."""
        self._announce(regimes=sorted(artefacts))

    def keeps_policies(self, policies: Mapping[str, JsonValue]) -> None:
        """Announce what the owner lets be shown, by artefact."""
        self._announce(policies=dict(policies))

    def _announce(self, **changes: object) -> None:
        changed = self._birth.model_copy(update=changes)
        if changed == self._birth:
            return
        self._birth = changed
        if self._link is not None:
            self._link.send(self._birth)

    def event(self, kind: EventKind, level: int = logging.INFO, /, **detail: JsonValue) -> None:
        """Report that something happened; the detail has the fields of EVENTS."""
        self.counts.note(kind, detail)
        log.log(level, "event=%s" + "".join(f" {key}=%r" for key in detail), kind, *detail.values())
        if self._link is not None:
            ts, rank = self._clock.wall_s(), ALARM if kind in ALARM_KINDS else EVENT
            self._link.outbox.put(
                kind, rank, lambda epoch, seq: Event(epoch=epoch, seq=seq, ts=ts, kind=kind, detail=detail).to_json()
            )

    def error(self, error: TaredError, **detail: JsonValue) -> None:
        """Report an error that the daemon survives."""
        self.event("error", logging.ERROR, code=error.code, message=str(error), **detail)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report a TaredError that the body raises, and go on after the body."""
        try:
            yield
        except TaredError as error:
            self.error(error)

    def telemetry(
        self,
        cameras: Mapping[str, CameraTelemetry],
        results_dropped: Mapping[str, int] | None = None,
        reasons: Mapping[str, str | None] | None = None,
        preview: Mapping[str, JsonValue] | None = None,
        labelled_accuracy: LabelledAccuracy | None = None,
    ) -> None:
        """Report a sample of the cameras and the board's health.

        Args:
            results_dropped: Lines of results lost, by output.
            reasons: The fields of Telemetry that say why the board is degraded, and what holds a job back.
            preview: Its state; empty or None without one.
            labelled_accuracy: What labels of drawn frames come to; None without any.
        """
        if self._link is None:
            return
        state: dict[str, JsonValue] = {**self.health(), "mqtt_dropped": sum(self._link.drops.values())}
        if results_dropped:
            state["results_dropped"] = dict(results_dropped)
        if preview:
            state["preview"] = dict(preview)
        if self._birth.commands.get("unsigned"):
            state["commands_unsigned"] = True
        ts = self._clock.wall_s()
        self._link.outbox.put(
            TELEMETRY,
            SAMPLE,
            lambda epoch, seq: Telemetry(
                epoch=epoch,
                seq=seq,
                ts=ts,
                cameras=dict(cameras),
                health=state,
                labelled_accuracy=labelled_accuracy,
                **reasons or {},
            ).to_json(),
        )
