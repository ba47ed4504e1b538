"""Seal and sign manifests, and find the key that does.

A seal, SHA-256 over the document, shows damage. A signature, HMAC-SHA256, shows who wrote it. The key comes from a
file, or from systemd as a credential: LoadCredential= in systemd.exec(5).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.store.files import open_regular

SCHEMA = 1
MANIFEST = "manifest.json"
CREDENTIAL = "tared-artefact-key"
NO_KEY = b"none"  # the credential's default in systemd/tared.service; an empty one is a key file that got lost
MIN_KEY_BYTES = 16
PURPOSE = "artefact manifest"
_MAKE_ONE = "make one: (umask 077; head -c 32 /dev/urandom > FILE)"


def credential(name: str) -> Path | None:
    """Return where the systemd credential of this name is, or would be; None outside a service that was given any."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return Path(folder, name) if folder else None


def is_credential(file: Path) -> bool:
    """Return True if systemd decides who may read the file."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)))


def find_key(path: Path | None = None) -> bytes | None:
    """Return the key that signs artefacts.

    A key has at least 16 bytes, binary or text; one newline at the end is not part of it. Outside
    $CREDENTIALS_DIRECTORY, whose access systemd controls (systemd.exec(5)), only the owner may read the file.

    Args:
        path: The key's file; None: systemd's credential, where there is one.

    Returns:
        None without a path and without a credential.

    Raises EngineError (`artefact.key`) for an unusable key, and for a `path` without a file.
    """
    file_path = path or credential(CREDENTIAL)
    if file_path is None:
        return None
    try:
        with open_regular(file_path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read().removesuffix(b"\n")
    except FileNotFoundError as error:
        if path is None:
            return None
        raise _bad_key(f"no {path}", _MAKE_ONE) from error
    except OSError as error:
        raise _bad_key(f"{file_path}: {error.strerror}", "check the file and its permissions") from error
    if path is None and key == NO_KEY:
        return None
    if mode & 0o077 and not is_credential(file_path):
        raise _bad_key(f"{file_path} with mode {mode:03o}, open to others than its owner", f"chmod 600 {file_path}")
    if len(key) < MIN_KEY_BYTES:
        raise _bad_key(f"{len(key)} bytes in {file_path}", _MAKE_ONE)
    return key


def sign(key: bytes, purpose: str, content: bytes) -> str:
    """Return the HMAC-SHA256 in hex.

    Args:
        key: The key of this machine.
        purpose: The kind of content, a line of text: a signature for one purpose is none for another.
    """
    return hmac.new(key, purpose.encode() + b"\n" + content, hashlib.sha256).hexdigest()


def is_signed(key: bytes, purpose: str, content: bytes, signature: object) -> bool:
    """Return True if `sign` made this signature; in constant time.

    Args:
        purpose: The kind of content, a line of text.
        signature: Anything; a value that is no signature gives False.

    >>> is_signed(b"k" * 16, "example", b"content", sign(b"k" * 16, "example", b"content"))
    True
    >>> is_signed(b"k" * 16, "example", b"content", sign(b"k" * 16, "another", b"content"))
    False
    """
    if not isinstance(signature, str) or not signature.isascii():
        return False
    return hmac.compare_digest(sign(key, purpose, content), signature)


def seal(document: Mapping[str, Any], key: bytes | None) -> bytes:
    """Return the bytes of a manifest file: the document, its `signature` and the `seal` over both.

    Args:
        document: The manifest, in JSON's types.
        key: Signs it; None: no signature.

    Raises ValueError for NaN.
    """
    signed = dict(document)
    if key is not None:
        signed["signature"] = sign(key, PURPOSE, canonical(document))
    return canonical({**signed, "seal": hashlib.sha256(canonical(signed)).hexdigest()})


def read_manifest(directory: Path, key: bytes | None) -> dict[str, Any]:
    """Read the sealed manifest of an artefact's directory; its files are not read.

    Args:
        directory: The artefact's.
        key: Only a manifest that it has signed is read; None: any.

    Raises EngineError:
        artefact.missing     there is no manifest
        artefact.unreadable  the disk, or its permissions, fail
        artefact.damaged     it is not what was written
        artefact.schema      it is of a newer tared
        artefact.signature   it is not signed with this key
    """
    file = directory / MANIFEST
    try:
        with open_regular(file, os.O_NOFOLLOW) as opened:
            written = opened.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EngineError(
            "artefact.missing", f"no {MANIFEST} in {directory}", "an artefact directory", "make one with 'tared build'"
        ) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    document = _unseal(file, written)
    signature = document.pop("signature", None)
    if key is not None and not is_signed(key, PURPOSE, canonical(document), signature):
        raise EngineError(
            "artefact.signature",
            f"{file} with {'no' if signature is None else 'another'} signature",
            "one made with the key of this machine",
            "build the artefact again here, or use the key that it was built with",
        )
    types = {"id": str, "inputs": dict, "files": dict}  # a seal does not promise them: anybody can seal anything
    if (
        not all(isinstance(document.get(name), kind) for name, kind in types.items())
        or not isinstance(document["inputs"].get("backend", {}), dict)
        or document.get("engine") not in (None, *document["files"])
    ):
        raise damaged(file)
    return document


def _unseal(file: Path, written: bytes) -> dict[str, Any]:
    """Return the document in these bytes; its signature, if it has one, is still in it and not verified."""
    try:
        document: dict[str, Any] = json.loads(written)
        recorded = document.pop("seal")
        sealed = hashlib.sha256(canonical(document)).hexdigest()
        whole = recorded == sealed and written == canonical({**document, "seal": recorded})
        schema = int(document["schema"])
    # RecursionError: lists in lists, deeper than any manifest's.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(file) from None
    if not whole:
        raise damaged(file)
    if schema > SCHEMA:
        raise EngineError(
            "artefact.schema",
            f"{file.parent} has schema {schema}",
            f"at most {SCHEMA}",
            "update tared, or build the artefact again with this version",
        )
    return document


def check_files(directory: Path, files: Mapping[str, str]) -> None:
    """Check that a directory holds these files beside its manifest, and no others.

    Args:
        directory: The artefact's.
        files: The SHA-256 in hex of each file, by name.

    Raises EngineError:
        artefact.damaged     a file is missing, changed or not named; the message names the first
        artefact.unreadable  the disk, or its permissions, fail
    """
    try:
        present = set(os.listdir(directory))
    except OSError as error:
        raise _unreadable(directory, error) from error
    for name in sorted({*files, *present} - {MANIFEST}):
        # A name that is not present here, "../engine", leads elsewhere.
        try:
            whole = name in present and sha256(directory / name) == files.get(name)
        except OSError:
            whole = False
        if not whole:
            raise damaged(directory / name)


def damaged(file: Path) -> EngineError:
    """Return the error for a file of an artefact that is missing, changed, or not named in the manifest."""
    return EngineError(
        "artefact.damaged",
        f"{file} is not what was written",
        "the bytes that the manifest names by hash",
        "build the artefact again, or roll back",
    )


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the one spelling of a document: sorted keys, fixed indent.

    Raises ValueError for NaN.

    >>> canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1})
    True
    """
    return (json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex.

    Raises OSError for anything but a regular file; for a link too: its target may change later.
    """
    digest = hashlib.sha256()
    with open_regular(file, os.O_NOFOLLOW) as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _unreadable(file: Path, error: OSError) -> EngineError:
    return EngineError(
        "artefact.unreadable",
        f"{file}: {error.strerror}",
        "an artefact that can be read",
        "check its permissions, or build it again",
    )


def _bad_key(found: str, remedy: str) -> EngineError:
    return EngineError("artefact.key", found, f"a key of at least {MIN_KEY_BYTES} bytes for its owner alone", remedy)
