"""What did not stand its probation leaves the store; why is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.backend import EngineError
from engines.refusals import record_refusal
from engines.seal import read_manifest
from engines.store import LINKS, Store

log = logging.getLogger(__name__)


def reject(store: Store, identity: str, rollback: Mapping[str, Any]) -> None:
    """Remove an artefact, for it could serve one day as the newest one left; `refused/` keeps its verdict, and why.

    What `current` or `previous` leads to stays, and what is not there is no matter. rollback: in JSON's types.
    Raises EngineError: `store.write`, `artefact.unreadable`.
    """
    path = next((place for place in store.places() if place.name == identity), None)
    if path is None or identity in [store.target(link) for link in LINKS]:
        return
    try:
        record_refusal(store.root, identity, {"rollback": dict(rollback), "verdict": _verdict(path)})
    except OSError as error:  # it goes all the same
        log.warning("refusal_not_kept error=%r", error.strerror)
    store.discard(path)


def _verdict(path: Path) -> Any:
    """What its manifest says; whoever signed it, for it is only kept to be looked at."""
    try:
        return read_manifest(path, None).get("verdict")
    except EngineError:
        return None
