"""In which order the boards of a rollout come: `1,5%,25%,100%`, each wave counted with those before it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo

from agent.common.errors import CommandError
from fleet.devices.devices import Device
from fleet.devices.selection import TAG

RANDOM, NAME = "random", "name"

_WAVE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Wave:
    """Up to so many boards, or so many of a hundred."""

    figure: float
    is_percent: bool

    def reaches(self, total: int) -> int:
        """How many of so many boards are done with after it: one at least, parts count as wholes."""
        count = math.ceil(self.figure * total / 100.0 - 1e-9) if self.is_percent else int(self.figure)
        return min(max(1, count), total)


def parse_waves(text: str) -> tuple[Wave, ...]:
    """Raises CommandError (`rollout.waves`) for what is none, or does not grow."""
    waves = tuple(_wave(each, text) for each in text.split(","))
    for before, after in pairwise(waves):
        if before.is_percent >= after.is_percent and (
            before.is_percent != after.is_percent or before.figure >= after.figure
        ):
            raise _wrong(text, "waves that grow, counts before percentages")
    return waves


def wave_sizes(waves: Sequence[Wave], total: int) -> list[int]:
    """How many boards each wave adds; those that would add none are left out."""
    reached, added = 0, []
    for wave in waves:
        after = wave.reaches(total)
        if after > reached:
            added.append(after - reached)
            reached = after
    return added


def check_order(order: str) -> str:
    """Raises CommandError (`rollout.order`) for what is none."""
    if order in (RANDOM, NAME) or (order.startswith(TAG) and len(order) > len(TAG)):
        return order
    raise CommandError("rollout.order", repr(order), f"{RANDOM}, {NAME}, or {TAG}NAME", "correct --order")


def order_devices(devices: Sequence[Device], order: str, seed: str) -> list[Device]:
    """The first ones first. order: as they are drawn; by name; or by what a tag says, such as the number of a ring,
    those without it last."""

    def drawn(device: Device) -> bytes:
        return hashlib.sha256(f"{seed}/{device.name}".encode()).digest()

    if order == RANDOM:
        return sorted(devices, key=drawn)
    if order == NAME:
        return sorted(devices, key=lambda device: device.name)
    tag = order[len(TAG) :]
    return sorted(
        devices, key=lambda device: (tag not in device.tags, _ranked(device.tags.get(tag, "")), drawn(device))
    )


def _ranked(value: str) -> tuple[float, str]:
    """Numbers by their size, before words."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def _wave(text: str, whole: str) -> Wave:
    found = _WAVE.fullmatch(text)
    if found is None:
        raise _wrong(whole, "counts and percentages such as 1,5%,25%,100%")
    figure, is_percent = float(found[1]), bool(found[2])
    if not 0.0 < figure <= (100.0 if is_percent else 1e9) or (not is_percent and figure != int(figure)):
        raise _wrong(whole, "counts from 1, percentages above 0% to 100%")
    return Wave(figure, is_percent)


def _wrong(found: str, expected: str) -> CommandError:
    return CommandError("rollout.waves", repr(found), expected, "correct --waves")


_WINDOW = re.compile(r"\s*(\d\d):(\d\d)\s*-\s*(\d\d):(\d\d)\s*")
_DAY_MIN = 24 * 60
_LEAST_S = 60.0


@dataclass(frozen=True)
class Window:
    """Minutes of a day, from midnight; one that ends before it begins goes over midnight."""

    begin_min: int
    end_min: int

    def closes_at(self, now: float, zone: str) -> float | None:
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
    end = max((end for each in windows if (end := each.closes_at(now, zone)) is not None), default=now)
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
