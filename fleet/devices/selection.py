"""Which devices are meant: `state=degraded,fidelity_low<0.9,tag.site=berlin`."""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from agent.common.errors import CommandError
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import FACTS, SILENT_S, Fact, facts

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(?:(<=|>=|!=|=|<|>)\s*(.*?))?\s*")
TAG = "tag."
_NEW_TAG = re.compile(r"([\w.-]{1,64})(?:=([\w. /+-]{0,128}))?")
FIGURES = frozenset(
    [
        "gain_db",
        "fidelity",
        "fidelity_low",
        "fidelity_high",
        "fidelity_n",
        "fps",
        "latency_p50",
        "latency_p99",
        "seen_s",
        "schema",
    ]
)


@dataclass(frozen=True)
class Condition:
    """On one fact, or on a tag; comparison: as it is written, or empty for a tag that has to be there."""

    fact: str
    comparison: str
    value: str

    def holds(self, known: Fact) -> bool:
        """Nothing is less or more than what nobody knows, and it is unlike everything."""
        if not self.comparison:
            return known is not None
        if known is None:
            return self.comparison == "!="
        if self.comparison in _ORDER:
            left, right = (float(known), float(self.value)) if self.fact in FIGURES else _versions(known, self.value)
            return _ORDER[self.comparison](left, right)
        same = float(self.value) == known if self.fact in FIGURES else fnmatchcase(str(known), self.value)
        return same is (self.comparison == "=")


def parse(text: str) -> tuple[Condition, ...]:
    """Conditions, all of which are to hold; separated by commas. With `=` and `!=` a word may have `*` and `?`.

    Raises CommandError (`fleet.where`) for a fact that there is not, and for a figure that is none.
    """
    return tuple(_condition(each) for each in text.split(",") if each.strip())


def select(devices: Devices, fleet: str, where: str | None, silent_s: float = SILENT_S) -> list[Device]:
    """Those devices, by their names; all of the fleet where None is asked for. A word without a comparison is a tag, or
    the name of a device. Raises CommandError as `parse`, and (`fleet.nobody`) where it matches none."""
    everybody, now = devices.all(fleet), time.time()
    conditions = parse(where or "")
    matching = [each for each in everybody if matches(each, conditions, now, silent_s)]
    if not matching and (where or everybody):
        found = f"none of the {len(everybody)} devices of {fleet!a} is {where!a}"
        raise CommandError("fleet.nobody", found, "at least one", "look at 'tared fleet devices', correct --where")
    return matching


def matches(device: Device, conditions: Sequence[Condition], now: float, silent_s: float = SILENT_S) -> bool:
    """Whether all of them hold. now: Unix time in s."""
    known = facts(device, now, silent_s)
    return all(each.holds(_of(device, known, each)) for each in conditions)


def parse_tag(text: str) -> tuple[str, str]:
    """`NAME` or `NAME=VALUE`; an empty value for a name alone. Raises CommandError (`fleet.tag`)."""
    found = _NEW_TAG.fullmatch(text)
    if found is None:
        expected = "NAME or NAME=VALUE: letters, digits, '_', '.' and '-', in a value spaces, '/' and '+' too"
        raise CommandError("fleet.tag", repr(text), expected, "rename the tag")
    return found[1], found[2] or ""


def _of(device: Device, known: dict[str, Fact], condition: Condition) -> Fact:
    if condition.fact.startswith(TAG):
        return device.tags.get(condition.fact[len(TAG) :])
    return known[condition.fact]


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise _wrong(text.strip(), "conditions such as state=degraded,fidelity_low<0.9")
    fact, comparison, value = found[1], found[2] or "", found[3] or ""
    if not comparison and fact not in FACTS and not fact.startswith(TAG):
        fact = TAG + fact
    if fact not in FACTS and not fact.startswith(TAG):
        raise _wrong(fact, f"one of {', '.join(FACTS)}, or tag.NAME")
    if fact in FIGURES and comparison and not _is_figure(value):
        raise _wrong(f"{fact}{comparison}{value}", "a number there")
    return Condition(fact, comparison, value)


def _is_figure(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _versions(*texts: Fact) -> tuple[Any, ...]:
    """Words whose numbers count as numbers: 1.10 comes after 1.9."""
    return tuple([_ranked(part) for part in re.split(r"(\d+)", str(text))] for text in texts)


def _ranked(part: str) -> tuple[bool, Any]:
    return (False, int(part)) if part.isdecimal() else (True, part)


def _wrong(found: str, expected: str) -> CommandError:
    return CommandError("fleet.where", repr(found), expected, "correct --where")
