"""Keep in a file what would take long to make again: kernel timings, costs of layers, compiled networks.

A library may parse these bytes without distrust, so only what was written here with the same key comes back. An
HMAC-SHA256 in the first line proves it; without a key it shows damage only. Old files go with the upkeep of the store
(engines/store/retention.py).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engines.store.files import open_regular, replace_files
from engines.store.signing import is_signed, sign


def read_kept(path: Path, key: bytes | None, purpose: str) -> bytes | None:
    """Return the content that `write_kept` wrote with the same key and purpose.

    Args:
        key: The key of this machine; None: only damage is found.
        purpose: The kind of content: content of another kind is refused.

    Returns:
        None for any other file, or none.
    """
    try:
        with open_regular(path) as file:
            signature, _, content = file.read().partition(b"\n")
    except OSError:
        return None
    return content if is_signed(key or b"", purpose, content, signature.decode(errors="replace")) else None


def write_kept(path: Path, key: bytes | None, purpose: str, content: bytes) -> None:
    """Write a file that `read_kept` reads, and its folder.

    If the disk refuses, nothing is kept, and the next reader finds none.

    Args:
        key: The key of this machine; None: only damage is found.
        purpose: The kind of content, a line of text.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_files({path: sign(key or b"", purpose, content).encode() + b"\n" + content})
