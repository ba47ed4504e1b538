"""Describe a broker: its address, our credentials there, and the TLS files; explain the errors of TLS.

`Endpoint` is what a connection needs to know of a broker. `TlsFiles` makes an ssl context of certificate files: which
authorities we trust, and the certificate that identifies us. `explain` turns an error of TLS into one with a remedy.
"""

from __future__ import annotations

import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import ValidationInfo, field_validator

from agent.common.credentials import FileOrCredential, locate
from agent.common.errors import AgentError, ConfigError
from agent.common.http.addresses import is_loopback
from agent.common.schema import Strict
from engines.store.files import open_regular, read_text

Protocol = Literal["auto", "5", "3.1.1"]
Transport = Literal["tcp", "websockets"]


class TlsFiles(Strict):
    """PEM files for TLS.

    Args:
        ca_file: The authority that must have signed the broker's certificate; None: any that the system trusts.
        cert_file: Our certificate, for a broker that identifies its clients by one.
        key_file: Its private key, which may also be in `cert_file`. A key that is encrypted with a password is not
            supported: a service has nobody who could type it.
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

    def context(self) -> ssl.SSLContext:
        """Read the files; TLS 1.2 or later, and the broker's name is always checked.

        Not `ssl.create_default_context`: from Python 3.13 on that refuses what most home-made CAs sign, for the lack
        of key identifiers (VERIFY_X509_STRICT). Raises ConfigError (`mqtt.tls`, `config.credential`).
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _Socket
        ca, certificate, key = (_readable(name, path) for name, path in self)
        try:
            if ca is not None:
                context.load_verify_locations(ca)
            else:
                context.load_default_certs()
            if certificate is not None:
                context.load_cert_chain(certificate, key, partial(_refuse_password, key or certificate))
        except ssl.SSLError as error:
            files = ", ".join(str(file) for file in (ca, certificate, key) if file is not None)
            expected = "certificates in PEM form, and the private key of the client's"
            raise ConfigError("mqtt.tls", f"{files}: {error.reason or error}", expected, "correct mqtt.tls") from error
        return context


def _readable(name: str, path: Path | None) -> Path | None:
    """Return where the file is; raises ConfigError if it cannot be read."""
    if path is None:
        return None
    file = locate(path)
    try:
        with open_regular(file):
            return file
    except OSError as error:
        found, remedy = f"{file}: {error.strerror}", f"correct mqtt.tls.{name}, or its permissions"
        raise ConfigError("mqtt.tls", found, "a file in PEM form", remedy) from error


def _refuse_password(key: Path) -> NoReturn:
    remedy = f"make one: openssl pkey -in {key} -out FILE; let nobody else read it"
    raise ConfigError("mqtt.tls", f"{key} is encrypted with a password", "a private key without one", remedy)


class _Socket(ssl.SSLSocket):
    """A TLS socket that is closed when its handshake fails, and that reports why the broker has hung up.

    With TLS 1.3 a broker that refuses our certificate may have said so, and gone, before our first word.
    """

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLEOFError, ConnectionError):
            with suppress(ssl.SSLWantReadError):
                self.recv(1)  # raises the broker's TLS alert
            raise


@dataclass(frozen=True)
class Endpoint:
    """A broker, and how to connect to it.

    Args:
        host: Name or address.
        keepalive_s: Seconds between pings; after 1.5 times as long without one the broker drops us.
        username: None to connect anonymously.
        password_file: A file whose first line is the password.
        tls: None for plain TCP.
        transport: Plain TCP, or websockets at `websocket_path`.
        protocol: The version of MQTT; auto is 5, or 3.1.1 if the broker does not speak it.
        will_delay_s: How long the broker waits for a lost client before it publishes the will. MQTT 5 only.
    """

    host: str
    port: int
    keepalive_s: int = 30
    username: str | None = None
    password_file: Path | None = None
    tls: TlsFiles | None = None
    transport: Transport = "tcp"
    websocket_path: str = "/mqtt"
    protocol: Protocol = "auto"
    will_delay_s: int = 20

    @property
    def exposes_password(self) -> bool:
        """True if the password crosses a network unencrypted."""
        return self.password_file is not None and self.tls is None and not is_loopback(self.host)

    def password(self) -> str | None:
        """Read the first line of the password file. Raises ConfigError (`mqtt.password`, `config.credential`)."""
        if self.password_file is None:
            return None
        try:
            return read_text(locate(self.password_file)).partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            expected = "a file in UTF-8 whose first line is the password"
            remedy = "correct mqtt.password_file, or its permissions"
            raise ConfigError("mqtt.password", str(error), expected, remedy) from error


# TLS alerts about our certificate: the end of OpenSSL's reason -> the finding, and the remedy.
_ALERTS = {
    "CERTIFICATE_REQUIRED": ("the broker requires a client certificate", "set mqtt.tls.cert_file and key_file"),
    "UNKNOWN_CA": (
        "the broker does not know the CA of the client certificate",
        "have mqtt.tls.cert_file signed by a CA that the broker trusts",
    ),
    "CERTIFICATE_EXPIRED": ("the broker finds the client certificate expired", "renew mqtt.tls.cert_file"),
    "CERTIFICATE_REVOKED": ("the broker finds the client certificate revoked", "renew mqtt.tls.cert_file"),
    "BAD_CERTIFICATE": ("the broker refuses the client certificate", "see the broker's log, and mqtt.tls.cert_file"),
    "CERTIFICATE_UNKNOWN": (
        "the broker refuses the client certificate",
        "see the broker's log, and mqtt.tls.cert_file",
    ),
    "UNSUPPORTED_CERTIFICATE": ("the broker refuses the client certificate", "a certificate for client authentication"),
    "HANDSHAKE_FAILURE": (
        "the broker ended the handshake, as it does without a client certificate, or without a common cipher",
        "see the broker's log; it may need mqtt.tls.cert_file and key_file",
    ),
}
_NOT_IN_TIME, _EXPIRED = 9, 10  # X509_V_ERR_* of OpenSSL
_OTHER_NAME, _OTHER_ADDRESS = 62, 64
_NO_TLS = (ssl.SSLEOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
_NO_TLS_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def explain(error: OSError, in_handshake: bool = False) -> AgentError | None:
    """Return the meaning of an error on a TLS connection (`broker.tls`); None if it has nothing to do with TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(error)
    reason = error.reason or "" if isinstance(error, ssl.SSLError) else ""
    for end, (found, remedy) in _ALERTS.items():
        if reason.endswith(end):
            return _refused(found, "a certificate that the broker accepts", remedy)
    if reason.endswith(("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")):
        return _refused("a broker without TLS 1.2 and 1.3", "TLS 1.2 or 1.3", "update the broker")
    if in_handshake and (isinstance(error, _NO_TLS) or reason in _NO_TLS_REASONS or "handshake" in str(error)):
        found = f"no TLS on this port ({error})"
        return _refused(found, "a TLS handshake", "set mqtt.port to the broker's port for TLS, or leave mqtt.tls out")
    return _refused(str(error), "TLS", "see the broker's log") if reason else None


def _untrusted(error: ssl.SSLCertVerificationError) -> AgentError:
    found = f"the broker's certificate is refused: {error.verify_message}"
    if error.verify_code in (_NOT_IN_TIME, _EXPIRED):
        now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        remedy = f"renew the certificate, or set the clock of this machine, which says {now} UTC"
        return _refused(found, "a certificate that is valid now", remedy)
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        remedy = "set mqtt.host to a name in the certificate, or have it issued for this name (subjectAltName)"
        return _refused(found, "a certificate for mqtt.host", remedy)
    return _refused(found, "a certificate signed by a trusted CA", "set mqtt.tls.ca_file to the CA that signed it")


def _refused(found: str, expected: str, remedy: str) -> AgentError:
    return AgentError("broker.tls", found, expected, remedy)
