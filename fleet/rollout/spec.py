"""Specify a rollout: the operation, the boards, their order, waves and hours, the gates, and the time limits.

Waves are written as `1,5%,25%,100%`, each counted together with those before it. Windows are hours of a board's local
time, such as `01:00-05:00`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from functools import cache, cached_property
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from agent.common.errors import CommandError
from agent.common.schema import Strict
from agent.contract import commands
from agent.contract.commands import SetArgs
from fleet.devices.devices import Device
from fleet.devices.selection import TAG
from fleet.operator import FILES, as_json, file_arguments_from, new_command
from fleet.rollout.gates import FAILURES_GATE, Gate, parse_gates

# By the name that a rollout has for it, each op of the contract that may be rolled out.
OPS: Mapping[str, str] = {each.rollout: op for op, each in commands.OPS.items() if each.rollout}
RANDOM, NAME = "random", "name"  # orders

_WAVE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGEST_S = 30 * 86_400.0
_WINDOW = re.compile(r"\s*(\d\d):(\d\d)\s*-\s*(\d\d):(\d\d)\s*")
_DAY_MIN = 24 * 60
_LEAST_S = 60.0  # that a window must have left for a command


@dataclass(frozen=True)
class RolloutSpec:
    """Specification of a rollout: its command, its boards and its pace.

    Attributes:
        op: One of OPS.
        arguments: Of the op, as they are typed; for a policy, its values as they are.
        select: Which devices, as `fleet.devices.selection.parse` reads it.
        waves: As `parse_waves` reads it.
        gates: As `parse_gates` reads it.
        soak_s: How long the boards of a finished wave serve before the wave is judged.
        at_once: How many boards work on it at the same time.
        windows: Hours of local time, by the tag `tz`, else by `timezone`; none: always.
        order: As `order_devices`.
        valid_s: How long a command waits for a board that is away.
        deadline_s: How long a board may work on it.
        silent_s: As in `facts`.
        file: The file whose chunks are sent to boards.
        signed: Send no command without an operator's signature.

    Raises CommandError: rollout.op, .waves, .gate, .window, .zone, .order, .time; and as `new_command`.
    """

    op: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    select: str = ""
    waves: str = "1,5%,25%,100%"
    gates: str = FAILURES_GATE
    soak_s: float = 1800.0
    at_once: int = 500
    windows: tuple[str, ...] = ()
    timezone: str = "UTC"
    order: str = RANDOM
    valid_s: float = 3600.0
    deadline_s: float = 7200.0
    silent_s: float = 600.0
    file: str | None = None
    signed: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise CommandError("rollout.op", repr(self.op), f"one of {', '.join(OPS)}", "correct --op")
        _ = self.args, self.parsed_waves, self.parsed_gates, self.parsed_windows
        if min(self.valid_s, self.silent_s) <= 0.0 or self.at_once < 1:
            found = f"valid {self.valid_s:g} s, silent {self.silent_s:g} s, {self.at_once} at once"
            raise CommandError("rollout.time", found, "times above 0, and at least one board at once", "correct them")
        check_zone(self.timezone)
        if self.order not in (RANDOM, NAME) and not (self.order.startswith(TAG) and len(self.order) > len(TAG)):
            expected = f"{RANDOM}, {NAME}, or {TAG}NAME"
            raise CommandError("rollout.order", repr(self.order), expected, "correct --order")

    @classmethod
    def from_json(cls, text: str) -> RolloutSpec:
        """Read the stored form. Raises CommandError (`rollout.spec`) for fields of a newer tared."""
        document = json.loads(text)
        if unknown := sorted(document.keys() - {each.name for each in fields(cls)}):
            found, remedy = f"a rollout with {', '.join(unknown)}", "run the tared that made it"
            raise CommandError("rollout.spec", found, "fields that this tared knows", remedy)
        return cls(**{**document, "windows": tuple(document["windows"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @cached_property
    def args(self) -> Strict:
        """The arguments of the op, as boards get them."""
        if self.op == "policy":
            return policy_arguments(self.arguments)
        return new_command(OPS[self.op], self.arguments, 1.0).args

    @cached_property
    def parsed_waves(self) -> tuple[Wave, ...]:
        return parse_waves(self.waves)

    @cached_property
    def parsed_gates(self) -> tuple[Gate, ...]:
        return parse_gates(self.gates)

    @cached_property
    def parsed_windows(self) -> tuple[Window, ...]:
        return parse_windows(self.windows)

    @property
    def is_job(self) -> bool:
        """Whether it takes a while, and ends in another engine."""
        return commands.OPS[OPS[self.op]].is_job


def typed_spec(op: str, arguments: Sequence[str], **others: Any) -> RolloutSpec:
    """Return the specification of what an operator has typed.

    Args:
        op: One of OPS.
        arguments: `key=value`; of a model or a calibration file=PATH.
        others: Further fields of RolloutSpec.

    Raises CommandError as RolloutSpec, and `command.args` for a file that cannot be read.
    """
    given: dict[str, Any] = dict(argument.partition("=")[::2] for argument in arguments)
    file = None
    if op in FILES:
        given, file = file_arguments_from(given)
    if op == "policy":
        given = {key: as_json(value) for key, value in given.items()}
    return RolloutSpec(**{**others, "op": op, "arguments": given, "file": None if file is None else str(file)})


def parse_duration(text: str) -> float:
    """Parse `90`, `90s`, `30m`, `2h` or `1d` into seconds. Raises CommandError (`rollout.time`)."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or (seconds := float(match[1]) * _UNITS[match[2]]) > _LONGEST_S:
        raise CommandError("rollout.time", repr(text), "a time such as 90s, 30m or 2h, to 30d", "correct it")
    return seconds


def policy_arguments(values: Mapping[str, Any]) -> SetArgs:
    """Return the arguments of `set`.

    Raises CommandError (`command.args`) for values that no board accepts, and for numbers that no key can sign.
    """
    inexact = [each for each in values.values() if isinstance(each, (int, float)) and not -(2**53) < each < 2**53]
    try:
        if inexact:
            raise ValueError(f"{str(inexact[0])[:40]} is beyond what JSON's numbers are exact for")
        return SetArgs(values=dict(values))
    except ValueError as error:  # pydantic's is one
        expected = "key=value, of those that 'set' takes"
        raise CommandError("command.args", " ".join(str(error).split())[:300], expected, "correct them") from None


@dataclass(frozen=True)
class Wave:
    """The size of a wave and those before it: a number of boards, or a percentage of all."""

    figure: float
    is_percent: bool

    def reaches(self, total: int) -> int:
        """Return how many of `total` boards are done after this wave: rounded up, at least one."""
        count = math.ceil(self.figure * total / 100.0 - 1e-9) if self.is_percent else int(self.figure)
        return min(max(1, count), total)


def parse_waves(text: str) -> tuple[Wave, ...]:
    """Parse waves. Raises CommandError (`rollout.waves`) if the text is none, or if the waves do not grow."""
    waves = []
    for part in text.split(","):
        match = _WAVE.fullmatch(part)
        if match is None:
            raise _wrong_waves(text, "counts and percentages such as 1,5%,25%,100%")
        figure, is_percent = float(match[1]), bool(match[2])
        if not 0.0 < figure <= (100.0 if is_percent else 1e9) or (not is_percent and figure != int(figure)):
            raise _wrong_waves(text, "counts from 1, percentages above 0% to 100%")
        waves.append(Wave(figure, is_percent))
    if any((one.is_percent, one.figure) >= (other.is_percent, other.figure) for one, other in pairwise(waves)):
        raise _wrong_waves(text, "waves that grow, counts before percentages")
    return tuple(waves)


def wave_sizes(waves: Sequence[Wave], total: int) -> list[int]:
    """Return how many boards each wave adds; waves that would add none are left out."""
    reached, added = 0, []
    for wave in waves:
        after = wave.reaches(total)
        if after > reached:
            added.append(after - reached)
            reached = after
    return added


def order_devices(devices: Sequence[Device], order: str, seed: str) -> list[Device]:
    """Return the devices in the order of their turns.

    order: RANDOM, drawn by `seed`; NAME; or `tag.NAME`, by a tag's value such as the number of a ring. Numbers come
    before words, and devices without the tag come last; those of equal value are drawn.
    """

    def drawn(device: Device) -> bytes:
        return hashlib.sha256(f"{seed}/{device.name}".encode()).digest()

    def by_tag(device: Device) -> tuple[bool, float, str, bytes]:
        value = device.tags.get(order[len(TAG) :])
        try:
            return value is None, float(value or ""), "", drawn(device)
        except ValueError:
            return value is None, math.inf, value or "", drawn(device)

    if order == RANDOM:
        return sorted(devices, key=drawn)
    if order == NAME:
        return sorted(devices, key=lambda device: device.name)
    return sorted(devices, key=by_tag)


def _wrong_waves(found: str, expected: str) -> CommandError:
    return CommandError("rollout.waves", repr(found), expected, "correct --waves")


@dataclass(frozen=True)
class Window:
    """Minutes of a day, from midnight. A window that ends before it begins goes over midnight."""

    begin_min: int
    end_min: int

    def closes_at(self, now: float, zone: str) -> float | None:
        """Return when the open window ends; None if it is shut. Unix time in s; zone: an IANA name."""
        local = datetime.fromtimestamp(now, _zone(zone))
        minute = local.hour * 60 + local.minute
        length = (self.end_min - self.begin_min) % _DAY_MIN or _DAY_MIN
        since = (minute - self.begin_min) % _DAY_MIN
        if since >= length:
            return None
        # Wall-clock arithmetic: if the clocks change in between, the end is still the hour that was named.
        end = local.replace(second=0, microsecond=0) + timedelta(minutes=length - since)
        return end.timestamp() if end.timestamp() > now else end.replace(fold=1).timestamp()  # that hour's second time


def parse_windows(texts: Sequence[str]) -> tuple[Window, ...]:
    """Parse windows such as `01:00-05:00`. Raises CommandError (`rollout.window`)."""
    windows = []
    for text in texts:
        match = _WINDOW.fullmatch(text)
        hours = [int(each) for each in match.groups()] if match else [99, 99, 99, 99]
        begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
        if max(hours[1], hours[3]) > 59 or begin >= _DAY_MIN or end > _DAY_MIN:
            raise CommandError("rollout.window", repr(text), "hours such as 01:00-05:00", "correct --window")
        windows.append(Window(begin, end % _DAY_MIN))
    return tuple(windows)


def open_until(windows: Sequence[Window], now: float, zone: str) -> float | None:
    """Return until when a board in this zone may be sent a command: infinity without windows.

    Return None if no window is open, or if less than a minute of it is left. now and the result: Unix time in s.
    """
    if not windows:
        return math.inf
    end = max((end for each in windows if (end := each.closes_at(now, zone)) is not None), default=now)
    return end if end - now >= _LEAST_S else None


def check_zone(name: str) -> None:
    """Check that a time zone is known. Raises CommandError (`rollout.zone`) for any other."""
    try:
        _zone(name)
    except (KeyError, ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError
        expected = "an IANA time zone such as Europe/Berlin"
        remedy = "correct --timezone or the tag 'tz'; where this machine knows none: pip install tzdata"
        raise CommandError("rollout.zone", repr(name), expected, remedy) from None


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
