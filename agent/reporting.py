"""What the daemon tells the world: numbered telemetry and events, over MQTT and in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from agent.health import health
from agent.link import MqttLink
from agent.messages import Birth, CameraTelemetry, Event, Telemetry
from calibrate.errors import TaredError
from engines.files import replace_files

log = logging.getLogger(__name__)


class Reporter:
    """Numbers telemetry and events together: `seq` runs without gaps within an `epoch`, one epoch per start.

    Without a link everything still goes to the log. One thread calls it.
    """

    def __init__(self, state_dir: Path, link: MqttLink | None, birth: Birth) -> None:
        self._link = link
        self._birth = birth
        self._epoch = _next_epoch(state_dir / "epoch")
        self._seq = 0

    def serves(self, engine: str, calibration: str | None) -> None:
        """Announce what is in service now, by the ids of artefact and calibration."""
        self._birth = self._birth.model_copy(update={"engine": engine, "calibration": calibration})
        if self._link is not None:
            self._link.send(self._birth)

    def event(self, kind: str, level: int = logging.INFO, /, **detail: JsonValue) -> None:
        """Report that something happened; `kind` as in Event."""
        words = " ".join(f"{key}={_plain(value)}" for key, value in detail.items())
        log.log(level, "event=%s %s", kind, words)
        if self._link is not None:
            self._link.send(Event(epoch=self._epoch, seq=self._next_seq(), ts=time.time(), kind=kind, detail=detail))

    def error(self, error: TaredError, **detail: JsonValue) -> None:
        """Report an error that something else survives."""
        self.event("error", logging.ERROR, code=error.code, message=str(error), **detail)

    def telemetry(self, cameras: Mapping[str, CameraTelemetry]) -> None:
        """Report a periodic sample of the cameras, with the board's health."""
        if self._link is None:
            return
        state: dict[str, JsonValue] = {**health(), "mqtt_dropped": sum(self._link.drops.values())}
        sample = Telemetry(epoch=self._epoch, seq=self._next_seq(), ts=time.time(), cameras=dict(cameras), health=state)
        self._link.send(sample)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _plain(value: JsonValue) -> str:
    """A value in a key=value log line: text quoted, numbers to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


def _next_epoch(path: Path) -> int:
    """One more than at the last start, durably. Where the count cannot be kept, the clock, which is larger than any."""
    try:
        epoch = int(path.read_text(encoding="ascii")) + 1 if path.exists() else 1
        replace_files({path: str(epoch).encode()})
        return epoch
    except (OSError, ValueError) as error:
        log.warning("epoch=clock file=%s error=%r", path, str(error))
        return int(time.time())
