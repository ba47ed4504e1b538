"""Define what a wave has to show before the next one starts: `fidelity>=0.95,latency_p99<=1.2x@90%,failures<=2%`.

There are two kinds of gates:
1. On the wave: `failures` and `unreached`, shares of its boards.
2. On each board: any figure of its telemetry. It has to hold on 95 % of the boards that succeeded, or on the share
   after `@`. With `x`, the bound is a multiple of what the same board had before. A gate does not hold on a board
   without telemetry since then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from agent.common.errors import CommandError
from fleet.devices.facts import FIGURES, Fact
from fleet.devices.selection import COMPARISONS

FAILURES, UNREACHED = "failures", "unreached"
FAILURES_GATE = "failures<=2%"

_OF_WAVE = (FAILURES, UNREACHED)
_MEASURED = sorted({*FIGURES} - {"seen_s", "schema"})
_SHARE = 0.95
_GATE = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)(%|x)?\s*(?:@\s*(\d+(?:\.\d+)?)%)?\s*")


@dataclass(frozen=True)
class Standing:
    """A board that was sent a command, as gates see it.

    failure: why it counts as failed; empty if it does not. reached: False if it never answered. before, after: its
    facts; after is None without telemetry since then.
    """

    device: str
    failure: str
    reached: bool
    before: Mapping[str, Fact]
    after: Mapping[str, Fact] | None


@dataclass(frozen=True)
class GateResult:
    """The verdict of a gate, as it is recorded. found: the figures behind it, in words."""

    gate: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Gate:
    """A bound on one metric.

    text: as it was written. value: a share of a wave is exact, so that 7 of 1000 are 0.7 %. relative: the value is a
    multiple of what the board had before. share: the share of the boards on which the gate has to hold.
    """

    text: str
    metric: str
    comparison: str
    value: float | Fraction
    relative: bool = False
    share: float = _SHARE

    @property
    def is_on_wave(self) -> bool:
        return self.metric in _OF_WAVE

    def is_out_of_reach(self, failed: int, unreached: int, total: int) -> bool:
        """Return True if the gate cannot hold any more, whatever the rest of the wave does."""
        count = {FAILURES: failed, UNREACHED: unreached}.get(self.metric)
        return count is not None and total > 0 and not self._compares(Fraction(count, total), self.value)

    def judge(self, wave: Sequence[Standing]) -> GateResult:
        """Judge the boards of a whole wave."""
        if self.is_on_wave:
            return self._judge_share(wave)
        succeeded = [each for each in wave if each.reached and not each.failure]
        silent, missed = 0, list[str]()
        for each in succeeded:
            known, bound = _number(each.after, self.metric), float(self.value)
            if self.relative:
                before = _number(each.before, self.metric)
                bound = math.nan if before is None else before * bound
            if known is None or math.isnan(bound):
                silent += 1
            elif not self._compares(known, bound):
                missed.append(f"{each.device} with {known:.4g}, where {bound:.4g} is the bound")
        held = len(succeeded) - silent - len(missed)
        needed = max(1, math.ceil(self.share * len(succeeded) - 1e-9))
        words = f"holds on {held} of {len(succeeded)} boards, {needed} are needed"
        words += f"; {silent} have reported nothing to judge by since" if silent else ""
        words += f"; not on {missed[0]}" if missed else ""
        return GateResult(self.text, held >= needed, words)

    def _judge_share(self, wave: Sequence[Standing]) -> GateResult:
        if self.metric == FAILURES:
            counted = [each for each in wave if each.reached and each.failure]
            first = f"; {counted[0].device}: {counted[0].failure}" if counted else ""
        else:
            counted, first = [each for each in wave if not each.reached], ""
        share = Fraction(len(counted), len(wave))
        words = f"{len(counted)} of {len(wave)}, {float(share):.1%}{first}"
        return GateResult(self.text, self._compares(share, self.value), words)

    def _compares(self, value: float | Fraction, bound: float | Fraction) -> bool:
        return COMPARISONS[self.comparison](value, bound)


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Parse gates; FAILURES_GATE is added if none is on failures.

    Raises CommandError (`rollout.gate`) for an unknown metric, and for a bound that is not a number.
    """
    gates = tuple(_gate(each.strip()) for each in text.split(",") if each.strip())
    return gates if any(each.metric == FAILURES for each in gates) else (*gates, _gate(FAILURES_GATE))


def judge(gates: Sequence[Gate], wave: Sequence[Standing]) -> list[GateResult]:
    """Judge all gates of a wave. A wave of which no board was reached does not pass."""
    if not any(each.reached for each in wave):
        return [GateResult("reached", False, f"none of the {len(wave)} boards has answered")]
    return [gate.judge(wave) for gate in gates]


def _gate(text: str) -> Gate:
    match = _GATE.fullmatch(text)
    if match is None:
        raise _wrong(text, "gates such as fidelity>=0.95, latency_p99<=1.2x@90%, failures<=2%")
    metric, comparison, value, unit, share = match.groups()
    if metric in _OF_WAVE:
        if unit != "%" or share is not None or comparison not in ("<", "<="):
            raise _wrong(text, f"{metric}<= and a percentage")
        return Gate(text, metric, comparison, Fraction(value) / 100)
    if metric not in _MEASURED:
        raise _wrong(metric, f"one of {', '.join((*_OF_WAVE, *_MEASURED))}")
    if unit == "%":
        raise _wrong(text, f"a number for {metric}, or a multiple such as 1.2x")
    part = _SHARE if share is None else float(share) / 100.0
    if not 0.0 < part <= 1.0:
        raise _wrong(text, "a share of boards above 0% to 100% after '@'")
    return Gate(text, metric, comparison, float(value), unit == "x", part)


def _number(facts: Mapping[str, Fact] | None, metric: str) -> float | None:
    value = facts.get(metric) if facts is not None else None
    return float(value) if isinstance(value, (int, float)) else None


def _wrong(found: str, expected: str) -> CommandError:
    return CommandError("rollout.gate", repr(found), expected, "correct --gate")
