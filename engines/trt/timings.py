"""The builder's timing cache on disk: how fast each kernel was, so that the next build need not try them again.

TensorRT parses the file, so it gets only bytes that were written here: an HMAC stands before them, with the key that
signs artefacts where there is one, and without a key against damage alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from engines.files import replace_files
from engines.seal import is_signed, sign
from engines.trt.api import IBuilderConfig

_PURPOSE = "timing cache"


def start_timings(config: IBuilderConfig, path: Path, key: bytes | None) -> None:
    """Begin with what earlier builds measured. A file that was damaged, or of another GPU, is as good as none."""
    cache = config.create_timing_cache(_read(path, key)) or config.create_timing_cache(b"")
    if cache is not None:
        config.set_timing_cache(cache, False)


def keep_timings(config: IBuilderConfig, path: Path, key: bytes | None) -> None:
    """Write what is known after a build; a disk that refuses costs the next build its time, and no more."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    content = bytes(cache.serialize())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_files({path: sign(key or b"", _PURPOSE, content).encode() + b"\n" + content})


def _read(path: Path, key: bytes | None) -> bytes:
    try:
        signature, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return b""
    return content if is_signed(key or b"", _PURPOSE, content, signature.decode(errors="replace")) else b""
