"""Specify a rollout: the operation, the boards, the waves and gates, and the time limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from agent.common.errors import CommandError
from agent.common.schema import Strict
from agent.contract.commands import SetArgs
from fleet.operator import file_arguments, new_command
from fleet.rollout.gates import FAILURES_GATE, Gate, parse_gates
from fleet.rollout.schedule import RANDOM, Wave, Window, check_order, check_zone, parse_waves, parse_windows

# What may be rolled out, by the contract's ops.
OPS: Mapping[str, str] = {
    "recalibrate": "recalibrate",
    "model": "model",
    "calibration": "calibration",
    "policy": "set",
    "regime": "switch",
}
JOBS = frozenset({"recalibrate", "model", "calibration"})  # these take a while, and end in another engine
FILES = frozenset({"model", "calibration"})


@dataclass(frozen=True)
class RolloutSpec:
    """What a rollout does, to which boards, and how fast.

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
            raise CommandError("rollout.time", found, "times above 0, and one board at once", "correct them")
        check_zone(self.timezone)
        check_order(self.order)

    @classmethod
    def from_json(cls, text: str) -> RolloutSpec:
        """Read the stored form. Raises CommandError (`rollout.spec`) for fields of a newer tared."""
        document = json.loads(text)
        if unknown := sorted(document.keys() - {each.name for each in fields(cls)}):
            found, remedy = f"a rollout with {', '.join(unknown)}", "run the tared that made it"
            raise CommandError("rollout.spec", found, "fields that this tared knows", remedy)
        return cls(**{**document, "windows": tuple(document["windows"])})

    def to_json(self) -> str:
        document = asdict(self)
        if not self.signed:  # an older tared, which does not know the field, can carry this rollout out
            del document["signed"]
        return json.dumps(document, sort_keys=True)

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
        return self.op in JOBS


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


def file_arguments_from(arguments: Mapping[str, str]) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of `model` or `calibration`, made of `file=...`, `url=...` and `release=...`.

    Return also the absolute path of the file, unless boards fetch it from `url`. Raises CommandError (`command.args`).
    """
    given = dict(arguments)
    path, url, release = Path(given.pop("file", "")), given.pop("url", None), given.pop("release", None)
    if given or not path.is_file():
        found = ", ".join(given) or f"no file {str(path)!r}"
        raise CommandError("command.args", found, "file=PATH, url=..., release=...", "correct the arguments")
    parsed = file_arguments(path, url, Path(release) if release is not None else None)
    return parsed, None if url is not None else str(path.resolve())
