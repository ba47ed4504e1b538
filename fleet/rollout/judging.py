"""How the boards of a wave stand once it has been looked at for long enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.devices import Device
from fleet.facts import Fact, facts
from fleet.rollout.gates import Finding, Standing, judge
from fleet.rollout.spec import Spec
from fleet.rollout.states import Target
from fleet.rollout.targets import TargetRow

_PATIENCE_S = 300.0  # with telemetry that is behind: its period, what an outbox gathers, a broker that was away


def judge_wave(
    spec: Spec, wave: Sequence[TargetRow], devices: Mapping[int, Device], now: float
) -> list[Finding] | None:
    """wave: all of its boards, each with what the store knows of it. None: it is too early, for some have told nothing
    since; they have five minutes more than the soak."""
    standings = [_standing(spec, each, devices[each.device], now) for each in wave]
    settled = max((each.settled or 0.0 for each in wave), default=0.0)
    waits = any(each.reached and not each.failure and each.after is None for each in standings)
    if waits and now < settled + spec.soak_s + _PATIENCE_S and not all(gate.of_wave for gate in spec.parsed_gates):
        return None
    return judge(spec.parsed_gates, standings)


def _standing(spec: Spec, target: TargetRow, device: Device, now: float) -> Standing:
    known = facts(device, now, spec.silent_s)
    has_told = device.telemetry_at is not None and target.settled is not None and device.telemetry_at > target.settled
    reached = target.state is not Target.UNREACHED and not device.is_newer
    failure = target.reason or "failed" if target.state is Target.FAILED else ""
    if target.state is Target.DONE and reached:
        failure = _relapse(spec, target, device, known)
    return Standing(target.name, failure, reached, target.before, known if has_told else None)


def _relapse(spec: Spec, target: TargetRow, device: Device, known: Mapping[str, Fact]) -> str:
    """What has become of a board since it did what it was told, if that is no good. A board that has made itself yet
    another engine since, as after an alarm, is no worse for it."""
    if known["state"] in ("silent", "offline"):
        return f"{known['state']} since"
    if known["state"] == "degraded" and target.before.get("state") != "degraded":
        return "degraded since"
    if spec.is_job and target.artefact != target.before.get("engine") == device.engine:
        return f"back at {device.engine}, which it had before"
    return ""
