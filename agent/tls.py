"""TLS towards a broker: whose certificates we believe, and the one that says who we are."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationInfo, field_validator

from agent.credentials import FileOrCredential, based
from agent.schema import Strict


class TlsFiles(Strict):
    """PEM files. ca_file: whose signature the broker's certificate must have; None: one of the system's.

    cert_file, key_file: for a broker that wants to know us by a certificate; the key may be in the same file. A key
    that is encrypted with a password is not supported: a service has nobody who could type it.
    """

    ca_file: FileOrCredential | None = None
    cert_file: FileOrCredential | None = None
    key_file: FileOrCredential | None = None

    @field_validator("key_file")
    @classmethod
    def _belongs_to_a_certificate(cls, key_file: Path | None, info: ValidationInfo) -> Path | None:
        if key_file is not None and info.data.get("cert_file") is None:
            raise ValueError("cert_file beside it")
        return key_file

    def based(self, base: Path) -> TlsFiles:
        """The same files, relative paths taken from the folder `base`."""
        return self.model_copy(update={name: based(path, base) for name, path in self})
