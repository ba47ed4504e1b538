"""Sign JSON documents and verify their signatures: Ed25519 (RFC 8032) over canonical JSON (RFC 8785).

A document carries its signature in the field `signature`, in base64. The signature covers the document without that
field. Keys are PEM files as OpenSSL writes them: PKCS 8, and SubjectPublicKeyInfo.

The package cryptography takes 7 MiB, and is imported only where there are keys.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rfc8785

from agent.common.credentials import locate
from agent.common.errors import ConfigError
from engines.store.files import read_regular
from engines.store.signing import is_credential

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_MAKE_ONE = "make one with 'tared keys new'"
_ID_CHARACTERS = 16
codecs.lookup("utf_16_be")  # rfc8785 sorts by it; Python opens a file for it, which may fail once commands come


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the bytes to sign: the document without `signature`, in canonical JSON (RFC 8785).

    Raises ValueError for a document that I-JSON cannot hold.

    >>> canonical({"op": "status", "id": "7", "signature": "..."})
    b'{"id":"7","op":"status"}'
    """
    return rfc8785.dumps({key: value for key, value in document.items() if key != "signature"})


def new_key(name: Path) -> tuple[Path, Path, str]:
    """Write the private key `name`.key, readable by its owner only, and `name`.pub.

    Args:
        name: Path of both files, without their endings.

    Returns:
        Both paths, private and public, and the key's id.

    Raises ConfigError:
        key.exists  one of the files exists; a key is never overwritten, because nobody could make it again
        key.write   the folder is not writable
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    paths = name.with_name(f"{name.name}.key"), name.with_name(f"{name.name}.pub")
    made: list[Path] = []
    try:
        for path, content, mode in zip(paths, (private, public), (0o600, 0o644), strict=True):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            made.append(path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        for each in made:  # neither is useful without the other
            each.unlink()
        if isinstance(error, FileExistsError):
            raise ConfigError("key.exists", f"{path} is there", "a new name", "remove it, or choose another") from None
        raise ConfigError("key.write", f"{path}: {error.strerror}", "a writable folder", "choose one") from error
    return *paths, key_id(key.public_key())


def key_id(key: Ed25519PublicKey) -> str:
    """Return the start of the SHA-256 of the public key's 32 bytes, in hex; logs and state files name keys by it."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:_ID_CHARACTERS]


class Signer:
    """Sign documents with a private key.

    Args:
        path: An Ed25519 private key, a PEM file; or `credential:NAME`, as `locate` finds it.

    Raises ConfigError:
        key.unreadable     no Ed25519 private key in PEM without a password
        key.mode           others than the owner may read the file
        config.credential  a credential that is not there
    """

    def __init__(self, path: Path) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        content = _read(path)
        mode = stat.S_IMODE(locate(path).stat().st_mode)
        if mode & 0o077 and not is_credential(locate(path)):
            found = f"{path} with mode {mode:03o}, open to others than its owner"
            raise ConfigError("key.mode", found, "a private key", f"chmod 600 {path}")
        try:
            key = serialization.load_pem_private_key(content, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _no_key(path, str(error)) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _no_key(path, "a private key of another kind")
        self._key = key

    def sign(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document with its signature, in base64.

        Raises ValueError for a document that I-JSON cannot hold.
        """
        signature = self._key.sign(canonical(document))
        return {**document, "signature": base64.b64encode(signature).decode()}


class Keyring:
    """Hold the public keys of one role, all that the files hold. `ids` names those that are trusted today.

    Args:
        paths: PEM files, each with one key or several; none: nothing is trusted.

    Raises ConfigError:
        key.unreadable     a file that is no public key
        config.credential  a credential that is not there

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     private, public, identity = new_key(Path(folder, "operator"))
    ...     signed = Signer(private).sign({"op": "status"})
    ...     keyring = Keyring([public])
    >>> keyring.signer_id(signed) == identity, keyring.signer_id({**signed, "op": "restart"})
    (True, None)
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        keys = [key for path in paths for key in _public_keys(path)]
        self._keys = {key_id(key): key for key in keys}
        self.ids = frozenset(self._keys)

    def signer_id(self, document: Mapping[str, Any]) -> str | None:
        """Return the id of the key that signed this document; None if none of these did."""
        if not self._keys:
            return None
        from cryptography.exceptions import InvalidSignature

        encoded = document.get("signature")
        if not isinstance(encoded, str) or not encoded.isascii():
            return None
        try:
            signature, message = base64.b64decode(encoded, validate=True), canonical(document)
        except (binascii.Error, ValueError):
            return None
        for identity, key in self._keys.items():
            try:
                key.verify(signature, message)
            except InvalidSignature:
                continue
            return identity
        return None


def _public_keys(path: Path) -> list[Ed25519PublicKey]:
    """Read the key of each PEM block: the loader would return the first of a file and ignore the others."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    content = _read(path)
    begins = [match.start() for match in re.finditer(rb"-----BEGIN ", content)] or [0]
    keys = []
    for begin, end in pairwise([*begins, len(content)]):
        try:
            key = serialization.load_pem_public_key(content[begin:end])
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _no_key(path, str(error)) from error
        if not isinstance(key, Ed25519PublicKey):
            raise _no_key(path, "a public key of another kind")
        keys.append(key)
    return keys


def _read(path: Path) -> bytes:
    try:
        return read_regular(locate(path))
    except OSError as error:
        raise _no_key(path, error.strerror or str(error)) from error


def _no_key(path: Path, found: str) -> ConfigError:
    return ConfigError("key.unreadable", f"{path}: {' '.join(found.split())}", "an Ed25519 key in PEM", _MAKE_ONE)
