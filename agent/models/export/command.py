"""`tared export`: write an artefact for another tool, into a folder of its own, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.common.errors import AgentError
from agent.models.export.deployments import export_deepstream, export_triton
from agent.models.export.graphs import export_onnx, export_openvino, export_trtexec, export_tvm
from agent.models.export.source import Export, ExportSource, open_source
from agent.models.export.tables import export_onnxruntime, export_ppq, export_tensorrt_cache
from engines.store.files import staging

README = "README.md"
FORMATS: Mapping[str, Callable[[ExportSource], Export]] = {
    "onnx": export_onnx,
    "trtexec": export_trtexec,
    "tensorrt-cache": export_tensorrt_cache,
    "onnxruntime": export_onnxruntime,
    "openvino": export_openvino,
    "deepstream": export_deepstream,
    "triton": export_triton,
    "tvm": export_tvm,
    "ppq": export_ppq,
}


def run_export(
    artefact: Path,
    to: str,
    output: Path,
    *,
    model: Path | None = None,
    licence: str = "",
    overwrite: bool = False,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Write one format into a new folder; return the object that --json prints.

    Args:
        to: One of FORMATS.
        model: The ONNX file that the artefact was built of, for formats that need a graph which it does not hold.
        licence: Of the model, as an SPDX expression; empty: what the ONNX file says.
        overwrite: An existing folder gives way once the new one is complete.
        key: As for `read_artefact`.

    Raises AgentError: `export.exists` for an existing folder, and as the formats and `open_source` do; EngineError
    `artefact.write` when the disk refuses.
    """
    output = Path(os.path.abspath(output))
    exists = os.path.lexists(output)
    if exists and not overwrite:
        raise _exists(f"{output} is there already", "choose another -o, or add --overwrite")
    export = FORMATS[to](open_source(artefact, model, licence, key))
    files = {**export.files, README: ("\n".join(export.readme) + "\n").encode()}
    if exists:
        _check_replaceable(output, files)
    with staging(output, replacing=overwrite) as folder:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if path.suffix in (".py", ".sh"):
                path.chmod(0o755)
    return {"format": to, "files": [str(output / name) for name in sorted(files)]}


def _check_replaceable(folder: Path, files: Mapping[str, bytes]) -> None:
    """Refuse to replace what an export would not write again: it may be somebody's work."""
    if folder.is_symlink() or not folder.is_dir():
        raise _exists(f"{folder}, which is not a folder", "choose another -o")
    there = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if not path.is_dir())
    other = next((name for name in there if name not in files), None)
    if other is not None:
        raise _exists(f"{folder} holds {other}, which this export does not write", "choose another -o, or remove it")


def _exists(found: str, remedy: str) -> AgentError:
    return AgentError("export.exists", found, "a new folder", remedy)
