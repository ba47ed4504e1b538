"""Select devices by conditions such as `state=degraded,fidelity_low<0.9,tag.site=berlin`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import CommandError
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import FIGURES, SILENT_S, WORDS, Fact, facts

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(?:(<=|>=|!=|=|<|>)\s*(.*?))?\s*")
TAG = "tag."
_NEW_TAG = re.compile(r"([\w.-]{1,64})(?:=([\w. /+-]{0,128}))?")
_FACTS = (*WORDS, *FIGURES)
_COLUMNS = {  # columns of the table devices, by the facts that they hold
    "name": "name",
    "engine": "engine",
    "model": "model",
    "calibration": "calibration",
    "agent": "agent_version",
}


@dataclass(frozen=True)
class Condition:
    """A condition on one fact or tag. comparison: as written; empty if the tag only has to exist."""

    fact: str
    comparison: str
    value: str

    def holds(self, known: Fact) -> bool:
        """Return True if the condition holds for this value. An unknown value fulfils `!=` alone."""
        if not self.comparison:
            return known is not None
        if known is None:
            return self.comparison == "!="
        if self.comparison in COMPARISONS:
            left, right = (float(known), float(self.value)) if self.fact in FIGURES else _versions(known, self.value)
            return COMPARISONS[self.comparison](left, right)
        same = float(self.value) == known if self.fact in FIGURES else fnmatchcase(str(known), self.value)
        return same is (self.comparison == "=")


def parse(text: str) -> tuple[Condition, ...]:
    """Parse conditions, separated by commas. With `=` and `!=` a word may have the wildcards `*` and `?`.

    A word without a comparison is a tag, or the name of a device. Raises CommandError (`fleet.where`) for an unknown
    fact, and for a figure that is not a number.
    """
    return tuple(_condition(each) for each in text.split(",") if each.strip())


def select(
    devices: Devices,
    fleet: str,
    where: str | None,
    silent_s: float = SILENT_S,
    most: int | None = None,
    after: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> list[Device]:
    """Return the devices of a fleet that fulfil all conditions, by name.

    Args:
        where: As `parse` reads it; None for all.
        most: Devices at most; None for all.
        after: Begin with the first name behind this one.

    Raises CommandError: fleet.where as `parse`, fleet.nobody  if no device matches
    """
    conditions, now = parse(where or ""), clock.wall_s()
    everybody = devices.all(fleet, *_in_sql(conditions), after)
    matching = list(islice((each for each in everybody if matches(each, conditions, now, silent_s)), most))
    if not matching and not after and (where or devices.count(fleet)):
        found = f"none of the {devices.count(fleet)} devices of {fleet!a} is {where!a}"
        raise CommandError(
            "fleet.nobody", found, "a condition that a device meets", "see 'tared fleet devices', and correct --where"
        )
    return matching


def _in_sql(conditions: Sequence[Condition]) -> tuple[str, list[object]]:
    """Return a condition in SQL that all matching devices fulfil, and its values; empty where none can be said.

    The database reads what is in columns of its own, and tags; `matches` has the last word.
    """
    parts, values = [], list[object]()
    for each in conditions:
        exactly = each.comparison == "=" and not set(each.value) & set("*?[")
        if each.fact in _COLUMNS and exactly:
            parts.append(f"d.{_COLUMNS[each.fact]} = ?")
            values.append(each.value)
        elif each.fact.startswith(TAG) and (exactly or not each.comparison):
            value = " AND t.value = ?" if exactly else ""
            parts.append(f"EXISTS (SELECT 1 FROM tags t WHERE t.device = d.id AND t.name = ?{value})")
            values += [each.fact.removeprefix(TAG), *([each.value] if exactly else [])]
    return " AND ".join(parts), values


def matches(device: Device, conditions: Sequence[Condition], now: float, silent_s: float = SILENT_S) -> bool:
    """Return True if the device fulfils all conditions. now: Unix time in s."""
    known = facts(device, now, silent_s)
    tags = {f"{TAG}{name}": value for name, value in device.tags.items()}
    return all(each.holds({**known, **tags}.get(each.fact)) for each in conditions)


def parse_tag(text: str) -> tuple[str, str]:
    """Parse `NAME` or `NAME=VALUE`; the value is empty for a name alone. Raises CommandError (`fleet.tag`)."""
    match = _NEW_TAG.fullmatch(text)
    if match is None:
        expected = "NAME or NAME=VALUE: letters, digits, '_', '.' and '-', in a value spaces, '/' and '+' too"
        raise CommandError("fleet.tag", repr(text), expected, "rename the tag")
    return match[1], match[2] or ""


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise _wrong(text.strip(), "conditions such as state=degraded,fidelity_low<0.9")
    fact, comparison, value = match[1], match[2] or "", match[3] or ""
    if not comparison and fact not in _FACTS and not fact.startswith(TAG):
        fact = TAG + fact
    if fact not in _FACTS and not fact.startswith(TAG):
        raise _wrong(fact, f"one of {', '.join(_FACTS)}, or tag.NAME")
    if fact in FIGURES and comparison:
        try:
            is_number = math.isfinite(float(value))
        except ValueError:
            is_number = False
        if not is_number:
            raise _wrong(f"{fact}{comparison}{value}", "a number as the value")
    return Condition(fact, comparison, value)


def _versions(*texts: Fact) -> tuple[Any, ...]:
    """Return keys that compare numbers within words as numbers: 1.10 comes after 1.9."""

    def key(part: str) -> tuple[bool, Any]:  # by length, then by digits: Python reads no number of thousands of them
        digits = part.lstrip("0")
        return (False, (len(digits), digits)) if part.isdecimal() else (True, part)

    return tuple([key(part) for part in re.split(r"(\d+)", str(text))] for text in texts)


def _wrong(found: str, expected: str) -> CommandError:
    return CommandError("fleet.where", repr(found), expected, "correct --where")
