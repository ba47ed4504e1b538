"""A small artefact, the key that signs it, and a manifest that somebody sealed anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.store.signing import MANIFEST, seal

ENGINE = bytes(range(200))
KEY = b"sixteen bytes ok"


def fill(directory: Path) -> Mapping[str, Any]:
    """Write the files of an artefact; return what its manifest says of them."""
    (directory / "engine.onnx").write_bytes(ENGINE)
    (directory / "plan.json").write_text("{}")
    return {"engine": "engine.onnx", "latency_ms": 1.5}


def reseal(directory: Path, **changes: Any) -> None:
    """Change the manifest and seal it, as anyone with write access to the store can."""
    document = json.loads((directory / MANIFEST).read_bytes())
    del document["seal"]
    (directory / MANIFEST).write_bytes(seal({**document, **changes}, None))
