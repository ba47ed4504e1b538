"""Put what is known of devices and rollouts into words, for tables, reports and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.contract.messages import SCHEMA_VERSION
from fleet.devices.devices import Device
from fleet.devices.facts import Fact
from fleet.rollout.spec import RolloutSpec

_MOST_NAMED = 5  # devices with a newer schema


def unread(devices: Sequence[Device]) -> str:
    """Return which devices have a tared that is too new for this one, and the remedy; empty if none has."""
    newer = [each for each in devices if each.is_newer]
    if not newer:
        return ""
    names = ", ".join(each.name for each in newer[:_MOST_NAMED]) + (", ..." if len(newer) > _MOST_NAMED else "")
    return (
        f"{len(newer)} speak a newer schema than {SCHEMA_VERSION}, the newest that this tared knows, "
        f"so only their presence is read: {names}; update this tared"
    )


def tag_names(device: Device) -> list[str]:
    """Return the tags of a device as `NAME` or `NAME=VALUE`."""
    return [f"{name}={value}" if value else name for name, value in device.tags.items()]


def interval(fact: Mapping[str, Fact]) -> str:
    """Return the fidelity and its interval, as `0.98 [0.92, 1.00]`; empty if unknown."""
    if fact["fidelity"] is None:
        return ""
    return f"{figure(fact['fidelity'], 3)} [{figure(fact['fidelity_low'], 3)}, {figure(fact['fidelity_high'], 3)}]"


def gain(fact: Mapping[str, Fact]) -> str:
    """Return what a recalibration would gain, in fidelity and in dB, as `0.032, 4.1 dB`; empty if unknown."""
    decibels = f"{figure(fact['gain_db'], 1)} dB" if fact["gain_db"] is not None else ""
    return ", ".join(part for part in (figure(fact["gain"], 3), decibels) if part)


def ago(seconds: Fact) -> str:
    """Return an age in words, in the unit that suits."""
    if seconds is None:
        return "never"
    age_s = float(seconds)
    for unit, size_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= 2.0 * size_s:
            return f"{age_s / size_s:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def figure(value: Fact, digits: int) -> str:
    """Return a figure with so many digits after the point; empty if unknown."""
    return f"{value:.{digits}f}" if isinstance(value, float) else ""


def unsigned_warning(spec: RolloutSpec, waves: Sequence[Sequence[Device]]) -> str:
    """Return how many boards of an unsigned rollout obey signed commands alone, and the remedy; empty if none does."""
    commands = [each.birth.get("commands") for wave in waves for each in wave]
    guarded = sum(isinstance(each, dict) and bool(each.get("operator_keys")) for each in commands)
    if not guarded or spec.signed:
        return ""
    return f"{guarded} of them have operators' keys: with --signed, only a controller with a key carries it out"
