"""Read a board's sensors through Linux: temperatures, throttling, power, power mode, memory; and its clock.

Everything but the state of the clock (adjtimex(2)) is read from files that any user may read. A sensor that is absent,
switched off, or of another kind of board is unknown. So is all that cannot be read for another reason, such as no
descriptors left: readings are for reports and precautions, and end nothing.
Layouts: Documentation/driver-api/thermal/sysfs-api.rst and Documentation/hwmon of the kernel, and "Platform Power and
Performance" of NVIDIA's Jetson Linux Developer Guide, releases 32 to 36.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from agent.common.errors import AgentError
from agent.common.timing import Backoff, RetryState
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

T = TypeVar("T")

_LIMITING_TRIPS = frozenset({"passive", "hot", "critical"})  # "active" ones only start a fan
_LEAST_LIMIT_C = 50.0  # a lower trip point is a notification for user space, or is not set
_CONSTANT_ZONES = frozenset({"PMIC-Die"})  # reads 100 degrees on every board that has it, hot or cold
# Cooling devices that reduce speed. Others are fans, backlights, radios, or settings whose state is never 0.
# The frequency limit of a power mode is no throttling: `scaling_max_freq` is below the chip's in most modes.
_THROTTLES = re.compile(r"-throttle-alert$|cpufreq|devfreq|[-_](balanced|heavy|critical)$|^Processor$")
_WHOLE_BOARD = frozenset({"VDD_IN", "POM_5V_IN"})  # the rail that feeds the others, on modules that measure it
# The INA3221, a hwmon device as of Jetson Linux 34, and up to 32 an IIO device: the names of its channels, and the
# files of each with mV, mA and limits, some of which have a unit.
_RAILS = (
    ("sys/class/hwmon/hwmon*/in*_label", "in{}_input", "curr{}_input", "curr{}_max", "curr{}_crit"),
    (
        "sys/bus/iio/devices/iio:device*/rail_name_*",
        "in_voltage{}_input",
        "in_current{}_input",
        "warn_current_limit_{}",
        "crit_current_limit_{}",
    ),
)
_TIME_ERROR = 5  # <linux/timex.h>
_STA_UNSYNC = 0x0040
# systemd-timesyncd creates this file once it has the time; needed by a service that must not call adjtimex.
_TIMESYNCD = Path("/run/systemd/timesync/synchronized")


@dataclass(frozen=True)
class Zone:
    """A thermal zone; limit_c: the temperature at which the kernel starts to slow the board down, None if unknown."""

    name: str
    temperature_c: float
    limit_c: float | None


@dataclass(frozen=True)
class Rail:
    """A power rail; share: its current as a share of the limit that slows the board down, None without a limit."""

    name: str
    power_w: float
    share: float | None


@dataclass(frozen=True)
class BoardReading:
    """A board at one moment; empty or None means unknown.

    throttling: Names of the cooling devices that slow it down.
    over_current_events: Counted since the board's start.
    """

    memory_available_bytes: int | None
    is_jetson: bool = False
    zones: tuple[Zone, ...] = ()
    throttling: tuple[str, ...] | None = None
    over_current_events: int | None = None
    rails: tuple[Rail, ...] = ()
    power_mode: str | None = None

    @property
    def power_w(self) -> float | None:
        """The power of the board: that of the rail that feeds all others, else the sum of the measured rails."""
        whole = [rail.power_w for rail in self.rails if rail.name in _WHOLE_BOARD]
        return sum(whole or [rail.power_w for rail in self.rails]) if self.rails else None


class BoardState:
    """Reads the board; `root` is where its file system starts. A sensor that cannot be read raises nothing."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self) -> BoardReading:
        """Read the board now; takes a few milliseconds where rails are measured over I2C."""
        return BoardReading(
            # A Jetson has unified memory: this is also what the GPU can have.
            memory_available_bytes=_read(lambda: int(psutil.virtual_memory().available), None),
            is_jetson=self._is_jetson(),
            zones=_read(lambda: tuple(self._zones()), ()),
            throttling=_read(self._throttling, None),
            over_current_events=_read(self._over_current_events, None),
            rails=_read(lambda: tuple(sorted(self._rails(), key=lambda rail: rail.name)), ()),
            power_mode=self._power_mode(),
        )

    def _is_jetson(self) -> bool:
        """Check the device tree, and nvpmodel, which exists on a Jetson only: some trees hold only a code name."""
        model = read_text(self._root / "proc/device-tree/model")
        return re.search(r"jetson|nvidia", model, re.IGNORECASE) is not None or self._power_mode() is not None

    def _zones(self) -> Iterator[Zone]:
        for folder in sorted(self._root.glob("sys/class/thermal/thermal_zone*")):
            name, millidegrees = read_text(folder / "type"), _number(folder / "temp")
            if name and millidegrees is not None and name not in _CONSTANT_ZONES:
                yield Zone(name, millidegrees / 1000.0, _limit_c(folder))

    def _throttling(self) -> tuple[str, ...] | None:
        states: list[tuple[str, float]] = []
        for folder in sorted(self._root.glob("sys/class/thermal/cooling_device*")):
            name, state = read_text(folder / "type"), _number(folder / "cur_state")
            if state is not None and _THROTTLES.search(name):
                states.append((name, state))
        return tuple(name for name, state in states if state > 0) if states else None

    def _over_current_events(self) -> int | None:
        counts = [_number(path) for path in self._root.glob("sys/class/hwmon/hwmon*/oc*_event_cnt")]
        known = [int(count) for count in counts if count is not None]
        return sum(known) if known else None

    def _rails(self) -> Iterator[Rail]:
        """Yield the rails that are connected (not "NC") and on; the sum of their shunt voltages is none of them."""
        for labels, *files in _RAILS:
            for label in self._root.glob(labels):
                name, channel = read_text(label), re.sub(r"\D", "", label.name)
                millivolts, milliamps, *limits = (_number(label.with_name(file.format(channel))) for file in files)
                is_other_chip = "hwmon" in labels and read_text(label.with_name("name")) != "ina3221"
                if is_other_chip or name in ("", "NC") or millivolts is None or milliamps is None:
                    continue
                lowest = min((limit for limit in limits if limit is not None and limit > 0), default=None)
                yield Rail(name, millivolts * milliamps / 1e6, milliamps / lowest if lowest else None)

    def _power_mode(self) -> str | None:
        """Return nvpmodel's mode by name, or by number where its configuration does not name it."""
        number = re.search(r"\d+", read_text(self._root / "var/lib/nvpmodel/status"))
        if number is None:
            return None
        mode = int(number[0])
        named = re.search(rf"<\s*POWER_MODEL\s+ID={mode}\s+NAME=(\S+)", read_text(self._root / "etc/nvpmodel.conf"))
        return named[1] if named else str(mode)


def _limit_c(zone: Path) -> float | None:
    """Return the lowest temperature at which the kernel reduces the speed or switches off."""
    limits = [
        millidegrees / 1000.0
        for kind in zone.glob("trip_point_*_type")
        if read_text(kind) in _LIMITING_TRIPS
        and (millidegrees := _number(kind.with_name(kind.name.removesuffix("type") + "temp"))) is not None
    ]
    return min((limit for limit in limits if limit >= _LEAST_LIMIT_C), default=None)


def _log_outage(error: TaredError | None) -> None:
    if error is None:
        log.info("board=readable")
    else:
        log.warning("board=unreadable error=%r", str(error))


# Shared by the process's threads, which log an outage once. It has ended after several whole readings.
_outage = RetryState(_log_outage, Backoff(), 50)


def _read(read: Callable[[], T], unknown: T) -> T:
    """Return a reading, or `unknown` where the system refuses it."""
    try:
        reading = read()
    except (OSError, RuntimeError, psutil.Error) as error:
        found = f"{type(error).__name__}: {error}"
        remedy = "check what else uses descriptors or memory on this board"
        _outage.note_failure(AgentError("board.unreadable", found, "files of sensors, which any user may read", remedy))
        return unknown
    _outage.note_success()
    return reading


def read_text(path: Path) -> str:
    """Return a file's text; empty where it cannot be read: sensors that are off answer EAGAIN or ENODATA."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    words = read_text(path).split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def health(board: BoardState | None = None) -> dict[str, float | str | bool]:
    """Return memory and load of this process and board, as telemetry reports them.

    Only what can be read: also temperatures in degrees C, power in W, a Jetson's power mode, and whether heat slows
    the board down (`throttling`).
    """
    reading = (board or BoardState()).read()
    available_bytes, power_w, throttling = reading.memory_available_bytes, reading.power_w, reading.throttling
    state = {
        "rss_bytes": _read(lambda: float(psutil.Process().memory_info().rss), None),
        "memory_available_bytes": None if available_bytes is None else float(available_bytes),
        "load_1min": _read(lambda: os.getloadavg()[0], None),
        **_read(_temperatures, dict[str, float]()),
        "power_mode": reading.power_mode,
        "power_w": None if power_w is None else round(power_w, 3),
        "throttling": None if throttling is None else bool(throttling),
    }
    return {name: value for name, value in state.items() if value is not None}


def _temperatures() -> dict[str, float]:
    """Return the highest temperature of each chip, by its key in `health`. Raises OSError."""
    chips = psutil.sensors_temperatures().items()
    return {f"temperature_{name}_c": max(each.current for each in sensors) for name, sensors in chips if sensors}


class _Timex(ctypes.Structure):
    """struct timex of a machine with 64-bit longs."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction", "tick")),
        *((name, ctypes.c_long) for name in ("ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        ("tai", ctypes.c_int),
        ("_reserved", ctypes.c_int * 11),
    )


def is_synchronised() -> bool:
    """Return True if the clock follows a time server; False also if unknown.

    A clock that may be wrong by years must not decide whether a command has expired.
    """
    state = _Timex()  # with modes 0 the call only reads
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    if answer < 0:
        return _TIMESYNCD.exists()
    return answer != _TIME_ERROR and not state.status & _STA_UNSYNC
