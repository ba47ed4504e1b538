"""PrecisionPlan: which compute nodes stay float, and why. Every other node may be INT8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from calibrate.errors import CalibrationError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PrecisionPlan:
    """floats: name of a compute node (convolution, matrix product, residual Add) -> reason in plain words."""

    floats: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "floats", MappingProxyType(dict(self.floats)))

    def to_json(self) -> str:
        """Text that `from_json` reads back to an equal plan; keys sorted, so equal plans give equal bytes."""
        return json.dumps({"schema": SCHEMA_VERSION, "floats": dict(self.floats)}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PrecisionPlan:
        """Raises CalibrationError: `plan.format` (not a plan), `plan.schema` (of another version)."""
        try:
            document: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise _not_a_plan(f"text that is not JSON ({error})") from error
        if not isinstance(document, dict) or "schema" not in document:
            raise _not_a_plan("JSON without the key 'schema'")
        if document["schema"] != SCHEMA_VERSION:
            raise CalibrationError(
                "plan.schema",
                f"a plan of schema {document['schema']!r}",
                f"schema {SCHEMA_VERSION}",
                "use the tared that wrote it, or write it anew",
            )
        floats = document.get("floats")
        if not isinstance(floats, dict) or not all(isinstance(reason, str) for reason in floats.values()):
            raise _not_a_plan("a plan whose 'floats' does not map node names to reasons")
        return cls(floats)


def _not_a_plan(found: str) -> CalibrationError:
    return CalibrationError(
        "plan.format", found, "a precision plan", 'write {"schema": 1, "floats": {"node name": "why it stays float"}}'
    )


ALL_INT8 = PrecisionPlan()
