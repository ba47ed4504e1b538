"""Describe which layers stay float and why, and how the INT8 layers are repaired: PrecisionPlan.

A plan is a JSON file of its own, which `tared plan` writes and every engine of a model is built by. Repairs are values
for calibrate/repair.py's methods; engines/quantise applies them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NoReturn

from calibrate.errors import CalibrationError

SCHEMA_VERSION = 3

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Repairs:
    """Hold the repairs that keep a layer in INT8 that would lose too much there. Layers are named as compute nodes.

    Args:
        divisors: For each layer, one positive number per input channel. The layer reads (x - offset) / divisor through
            a Q of its own, and its weights and bias are changed to match, so that in float nothing changes.
        offsets: For each layer, one number per input channel, in the units of x.
        ranges: The amax of the tensor that such a layer reads, by the tensor's name, for calibrations
            that do not show it.
        reach: By the same name, the part that this range covers, as a multiple of the tensor's largest |x|, or with
            offsets of its span: less than 1 clips rare values, more is headroom. A tensor that is not named has 1.
        methods: Another threshold method than the calibration's, by tap.
        clips: For each layer the fraction of its largest weight that the scale reaches, one in (0, 1] per output
            channel.
        shifts: For each layer the shift that INT8 makes in the mean of its outputs, one per output channel; its bias is
            reduced by it.

    >>> repairs = Repairs(divisors={"conv1": (1.0, 0.25)})
    >>> repairs.as_dict(), bool(Repairs())
    ({'divisors': {'conv1': (1.0, 0.25)}}, False)
    """

    divisors: Mapping[str, Numbers] = field(default_factory=dict)
    offsets: Mapping[str, Numbers] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)
    reach: Mapping[str, float] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    clips: Mapping[str, Numbers] = field(default_factory=dict)
    shifts: Mapping[str, Numbers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, MappingProxyType(dict(getattr(self, each.name))))

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the repairs that are not empty, in JSON's types."""
        return {each.name: dict(getattr(self, each.name)) for each in fields(self) if getattr(self, each.name)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Repairs:
        """Read the document that `as_dict` returned.

        Raises ValueError for anything else.
        """
        unknown = document.keys() - {each.name for each in fields(cls)}
        if unknown:
            raise ValueError(f"no repair is called '{min(unknown)}'")
        rows = {name: _rows(document.get(name, {}), name) for name in ("divisors", "offsets", "clips", "shifts")}
        ranges, reach = (
            {str(tensor): _number(value) for tensor, value in document.get(name, {}).items()}
            for name in ("ranges", "reach")
        )
        methods = dict(document.get("methods", {}))
        if not all(isinstance(method, str) for method in methods.values()):
            raise ValueError("a method that is no text")
        if not all(value > 0.0 for row in rows["divisors"].values() for value in row):
            raise ValueError("a divisor that is not positive")
        if not all(0.0 < value <= 1.0 for row in rows["clips"].values() for value in row):
            raise ValueError("a clip outside (0, 1]")
        if not all(amax >= 0.0 for amax in ranges.values()):
            raise ValueError("a negative range")
        if not all(multiple > 0.0 for multiple in reach.values()):
            raise ValueError("a reach that is not positive")
        return cls(**rows, ranges=ranges, reach=reach, methods=methods)


@dataclass(frozen=True)
class PrecisionPlan:
    """Name the nodes that stay float; every other node may be INT8.

    Args:
        floats: Name of a compute node (convolution, matrix product, residual Add) -> reason in plain words.
        repairs: How layers that become INT8 are repaired.
        evidence: How the plan was found, for people; no engine depends on it, and equal plans may differ in it.

    >>> plan = PrecisionPlan({"head/conv": "loses 4 dB in INT8"})
    >>> PrecisionPlan.from_json(plan.to_json()) == plan
    True
    >>> plan.essence
    {'floats': ['head/conv']}
    """

    floats: Mapping[str, str] = field(default_factory=dict)
    repairs: Repairs = field(default_factory=Repairs)
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "floats", MappingProxyType(dict(self.floats)))
        object.__setattr__(self, "evidence", MappingProxyType(dict(self.evidence)))

    @property
    def effective(self) -> Repairs:
        """The repairs of the layers that become INT8; layers that stay float need none."""

        def kept(rows: Mapping[str, Numbers]) -> dict[str, Numbers]:
            return {layer: row for layer, row in rows.items() if layer not in self.floats}

        repairs = self.repairs
        divisors, offsets = kept(repairs.divisors), kept(repairs.offsets)
        return replace(
            repairs, divisors=divisors, offsets=offsets, clips=kept(repairs.clips), shifts=kept(repairs.shifts)
        )

    @property
    def essence(self) -> dict[str, Any]:
        """The part that an engine depends on, in JSON's types: the reasons are not part of it."""
        return {"floats": sorted(self.floats), **({"repairs": self.repairs.as_dict()} if self.repairs else {})}

    def to_json(self) -> str:
        """Return text that `from_json` reads back to an equal plan; equal plans give equal bytes."""
        evidence = {"evidence": dict(self.evidence)} if self.evidence else {}
        document = {"schema": SCHEMA_VERSION, **self.essence, "floats": dict(self.floats), **evidence}
        return json.dumps(document, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PrecisionPlan:
        """Read a plan.

        Raises CalibrationError:
            plan.format  the text is not a plan
            plan.schema  the plan is of another version
        """
        try:
            document: Any = json.loads(text)
        except (RecursionError, ValueError) as error:
            _refuse(f"text that is not JSON ({error})")
        if not isinstance(document, dict) or "schema" not in document:
            _refuse("JSON without the key 'schema'")
        if document["schema"] != SCHEMA_VERSION:
            found, expected = f"a plan of schema {document['schema']!r}", f"schema {SCHEMA_VERSION}"
            raise CalibrationError("plan.schema", found, expected, "use the tared that wrote it, or write it again")
        floats = document.get("floats")
        if not isinstance(floats, dict) or not all(isinstance(reason, str) for reason in floats.values()):
            _refuse("a plan whose 'floats' does not map node names to reasons")
        repairs, evidence = document.get("repairs", {}), document.get("evidence", {})
        if not isinstance(evidence, dict):
            _refuse("a plan whose 'evidence' is no object")
        try:
            return cls(floats, Repairs.from_dict(repairs), evidence)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            _refuse(f"a plan whose repairs are not as tared writes them ({error})")


def _rows(rows: Any, repair: str) -> dict[str, Numbers]:
    if not all(isinstance(row, (list, tuple)) for row in rows.values()):
        raise ValueError(f"{repair} that are no list of numbers")
    return {layer: tuple(map(_number, row)) for layer, row in rows.items()}


def _number(value: Any) -> float:
    """Return a finite number; refuse text and truth values, which float() would accept."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a finite number belongs")
    return float(value)


def _refuse(found: str) -> NoReturn:
    raise CalibrationError(
        "plan.format", found, "a precision plan", 'write {"schema": 3, "floats": {"node name": "why it stays float"}}'
    ) from None


ALL_INT8 = PrecisionPlan()
