"""Which artefacts of a store stay, and why; decided from what is known of them, without a disk.

Pinned is what some part of the daemon needs: `current`, `previous`, what is loaded, the regimes. With those stays the
float reference of their models, which serves when nothing else can, and which a full disk would not let be built anew.
Beside them the newest few stay as long as there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

REFERENCE = "reference"
RECENT = "recent"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Stored:
    """An artefact as it lies in the store.

    made_s: Unix time. trouble: code of the error that reading it gave, empty for a sound one. model: SHA-256 of its
    master graph, empty where that cannot be read. reference: whether it is a float engine without a calibration.
    """

    id: str
    made_s: float
    nbytes: int
    trouble: str = ""
    model: str = ""
    reference: bool = False

    @property
    def unknown(self) -> bool:
        """Whether it cannot be judged: of a newer tared, or not to be read today. It is none of ours to remove."""
        return self.trouble in ("artefact.schema", "artefact.unreadable")

    @property
    def damaged(self) -> bool:
        """Whether it can serve no more."""
        return bool(self.trouble) and not self.unknown


@dataclass(frozen=True)
class Retention:
    """What becomes of the artefacts of a store.

    roles: per artefact that stays why it does, `recent` last. goes: what nobody needs, damaged ones first, then the
    oldest first. spare: what stays for no other reason than that it is recent, the oldest first.
    """

    roles: Mapping[str, tuple[str, ...]]
    goes: tuple[Stored, ...]
    spare: tuple[Stored, ...]


def retain(stored: Collection[Stored], pins: Mapping[str, Collection[str]], keep: int) -> Retention:
    """Decide. pins: by role, the ids of what is needed. keep: so many of the newest that can serve stay.

    What cannot be judged stays as `unknown`. A damaged artefact stays only where it is pinned: an engine can be built
    anew from what is left of it.
    """
    roles: dict[str, tuple[str, ...]] = {}
    for artefact in stored:
        why = [role for role, ids in pins.items() if artefact.id in ids]
        if why or artefact.unknown:
            roles[artefact.id] = (*why, UNKNOWN) if artefact.unknown else tuple(why)
    newest = sorted((one for one in stored if not one.trouble), key=_age, reverse=True)
    needed = {one.model for one in stored if one.model and any(one.id in ids for ids in pins.values())}
    for identity in _references(newest, needed):
        roles[identity] = (*roles.get(identity, ()), REFERENCE)
    spare = [one for one in newest[:keep] if one.id not in roles]
    for artefact in newest[:keep]:
        roles[artefact.id] = (*roles.get(artefact.id, ()), RECENT)
    goes = sorted((one for one in stored if one.id not in roles), key=lambda one: (not one.damaged, *_age(one)))
    return Retention(roles, tuple(goes), tuple(reversed(spare)))


def _references(newest: Sequence[Stored], needed: Collection[str]) -> list[str]:
    """The newest float reference of each of these models; where none is needed, the newest of all."""
    found: dict[str, str] = {}
    for one in newest:
        if one.reference and (one.model in needed or not needed):
            found.setdefault(one.model, one.id)
    return list(found.values()) if needed else list(found.values())[:1]


def _age(artefact: Stored) -> tuple[float, str]:
    """Sorts the oldest first; the id decides between two of one moment."""
    return artefact.made_s, artefact.id
