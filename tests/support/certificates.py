"""Certificates for tests: a CA and what it signs, made in a moment, and valid for as long as a test says."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A CA of its own name and key; `file` is its certificate."""

    def __init__(self, folder: Path, name: str = "the CA of the tests") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        signed = self._sign(self._name, self._key.public_key(), -1.0, 1.0, x509.BasicConstraints(True, 0))
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(signed.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        days: tuple[float, float] = (-1.0, 1.0),
        password: bytes | None = None,
    ) -> Pair:
        """A certificate for these names and addresses. days: from when until when it is valid, from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        signed = self._sign(_name(name), key.public_key(), *days, names)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        protection: KeySerializationEncryption = BestAvailableEncryption(password) if password else NoEncryption()
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection))
        return pair

    def revoke(self, *pairs: Pair) -> Path:
        """The list of these certificates as revoked, as a PEM file."""
        now = datetime.datetime.now(datetime.timezone.utc)
        day = datetime.timedelta(days=1.0)
        revoked = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        revoked = revoked.last_update(now - day).next_update(now + day)
        for pair in pairs:
            number = x509.load_pem_x509_certificate(pair.certificate.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now - day).build()
            revoked = revoked.add_revoked_certificate(entry)
        file = self._folder / "revoked.crl"
        file.write_bytes(revoked.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return file

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        first_day: float,
        last_day: float,
        extension: x509.ExtensionType,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=first_day))
            .not_valid_after(now + datetime.timedelta(days=last_day))
            .add_extension(extension, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
