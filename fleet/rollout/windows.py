"""When a board may be told to change: hours of its own local time, such as `01:00-05:00`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from agent.errors import CommandError

_WINDOW = re.compile(r"\s*(\d\d):(\d\d)\s*-\s*(\d\d):(\d\d)\s*")
_DAY_MIN = 24 * 60
_LEAST_S = 60.0


@dataclass(frozen=True)
class Window:
    """Minutes of a day, from midnight; one that ends before it begins goes over midnight."""

    begin_min: int
    end_min: int

    def closes(self, now: float, zone: str) -> float | None:
        """When the window that is open now ends there; None where it is shut. Unix times in s; zone: IANA's name."""
        local = datetime.fromtimestamp(now, _zone(zone))
        minute = local.hour * 60 + local.minute
        length = (self.end_min - self.begin_min) % _DAY_MIN or _DAY_MIN
        since = (minute - self.begin_min) % _DAY_MIN
        if since >= length:
            return None
        # Wall-clock arithmetic: where the clocks change in between, the end is still the hour that was named.
        end = local.replace(second=0, microsecond=0) + timedelta(minutes=length - since)
        return end.timestamp() if end.timestamp() > now else end.replace(fold=1).timestamp()  # that hour's second time


def parse_windows(texts: Sequence[str]) -> tuple[Window, ...]:
    """Raises CommandError (`rollout.window`)."""
    return tuple(map(_window, texts))


def open_until(windows: Sequence[Window], now: float, zone: str) -> float | None:
    """Until when a board there may be told; infinity without any window, None where it may not now, nor where there is
    hardly any time left to."""
    if not windows:
        return float("inf")
    end = max((end for each in windows if (end := each.closes(now, zone)) is not None), default=now)
    return end if end - now >= _LEAST_S else None


def check_zone(name: str) -> str:
    """Raises CommandError (`rollout.zone`) for a name that nobody knows."""
    try:
        return _zone(name).key
    except (KeyError, ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError
        expected = "an IANA time zone such as Europe/Berlin"
        remedy = "correct --timezone or the tag 'tz'; where this machine knows none: pip install tzdata"
        raise CommandError("rollout.zone", repr(name), expected, remedy) from None


def _window(text: str) -> Window:
    found = _WINDOW.fullmatch(text)
    hours = [int(each) for each in found.groups()] if found else [99, 99, 99, 99]
    begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if max(hours[1], hours[3]) > 59 or begin >= _DAY_MIN or end > _DAY_MIN:
        raise CommandError("rollout.window", repr(text), "hours such as 01:00-05:00", "correct --window")
    return Window(begin, end % _DAY_MIN)


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
