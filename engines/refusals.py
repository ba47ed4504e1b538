"""Why candidates were refused: one file each under `refused/` in the state directory, the newest kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.files import replace_files

SCHEMA = 1
_MOST = 20


def record_refusal(store_root: Path, identity: str, evidence: Mapping[str, Any]) -> Path:
    """Keep why the candidate of this artefact id was refused: the file, which takes the place of an earlier one.

    evidence: in JSON's types. The newest 20 refusals are kept. One process refuses at a time: what another one that was
    killed left unfinished is removed. Raises OSError.
    """
    folder = store_root / "refused"
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".*.new"):
        unfinished.unlink(missing_ok=True)
    path = folder / f"{identity}.json"
    document = {**evidence, "schema": SCHEMA, "id": identity, "ts": round(time.time(), 3)}
    replace_files({path: json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"})
    newest = sorted(folder.glob("*.json"), key=lambda refusal: refusal.stat().st_mtime_ns, reverse=True)
    for old in [refusal for refusal in newest if refusal != path][_MOST - 1 :]:
        old.unlink(missing_ok=True)
    return path
