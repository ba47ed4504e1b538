"""The signed command in docs/guides/commands.md: other programs check their own signatures by it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import rfc8785
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from places import ROOT

from agent.commands.dispatcher import parse_command
from agent.contract.signing import Keyring, Signer

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def example() -> tuple[bytes, bytes, str]:
    """Return the bytes that are signed, the public key, and the signed document."""
    section = (ROOT / "docs/guides/commands.md").read_text().partition("## Sign with a program of your own")[2]
    message, public, document = re.findall(r"```\w+\n(.*?)\n```", section, re.DOTALL)[:3]
    return message.encode(), bytes.fromhex(public), document


def test_the_signature_fits_without_tared() -> None:
    message, public, text = example()
    document = json.loads(text)
    signature = base64.b64decode(document.pop("signature"), validate=True)
    Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    assert rfc8785.dumps(document) == message
    assert PRIVATE.public_key().public_bytes_raw() == public


def test_tared_signs_and_admits_it(tmp_path: Path) -> None:
    _, public, text = example()
    document = json.loads(text)
    private_file, public_file = tmp_path / "example.key", tmp_path / "example.pub"
    private_file.touch(0o600)
    private_file.write_bytes(
        PRIVATE.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    public_file.write_bytes(
        Ed25519PublicKey.from_public_bytes(public).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    assert Signer(private_file).sign(document) == document
    assert Keyring([public_file]).signer_id(document)
    assert parse_command(text.encode(), document["issued"]).command.op == "recalibrate"
