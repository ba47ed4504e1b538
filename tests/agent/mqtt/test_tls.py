"""TLS towards real brokers: certificates that are accepted, and the errors for the others."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import socket
import ssl
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brokers import (
    PROTOCOLS,
    Mosquitto,
    check_board_reports_and_obeys,
    eventually,
    running_mosquitto,
)
from certificates import Authority, Pair
from fake_broker import FakeBroker, admit, publish

from agent.common.errors import ConfigError
from agent.common.timing import Backoff
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint, Protocol, TlsFiles

SELDOM = 3600.0  # seconds
pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("no_thread_left")]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextlib.contextmanager
def tls_broker(folder: Path, authority: Authority, served: Pair, *settings: str) -> Iterator[Mosquitto]:
    """A mosquitto that shows this certificate, and knows the clients of this authority."""
    files = f"cafile {authority.file}", f"certfile {served.certificate}", f"keyfile {served.key}"
    with running_mosquitto(folder, *files, *settings) as broker:
        yield broker


@contextlib.contextmanager
def tried(endpoint: Endpoint) -> Iterator[MqttClient]:
    """A client that tries once."""
    with MqttClient(endpoint, "us", SessionOptions(backoff=Backoff(SELDOM, SELDOM, random.Random(7)))) as client:
        yield client
        client.close(timeout_s=0.0)


def refused(endpoint: Endpoint, words: str) -> None:
    """Fails unless the first attempt ends with an error of which these are parts."""
    with tried(endpoint) as client:
        eventually(lambda: client.outcome not in ("not tried yet", "no answer to CONNECT"))
        assert not client.connected
        for part in words.split(" ... "):
            assert part in client.outcome


@pytest.mark.parametrize("protocol", PROTOCOLS.values())
def test_a_board_reports_and_obeys(tmp_path: Path, authority: Authority, protocol: Protocol) -> None:
    tls = TlsFiles(ca_file=authority.file)
    with tls_broker(tmp_path, authority, authority.issue("broker")) as broker:
        check_board_reports_and_obeys(replace(broker.endpoint, tls=tls, protocol=protocol))


def test_messages_that_tls_has_read_ahead_do_not_wait(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MqttClient, "_wait_s", 3600.0)  # so long a turn waits for an event of the socket
    served = authority.issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(served.certificate, served.key)
    with FakeBroker("5", context) as broker:
        endpoint = replace(broker.endpoint, tls=TlsFiles(ca_file=authority.file))
        options = SessionOptions(subscriptions=["t"])
        with MqttClient(endpoint, "us", options) as client, broker.connection() as connection:
            admit(connection, b"\1", b"")
            connection.sendall(b"".join(publish("t", bytes([number]), b"") for number in range(250)))  # one record
            eventually(lambda: client.inbox.qsize() + client.drops["incoming"] == 250)
            client.close(timeout_s=0.0)


@pytest.mark.parametrize(
    ("certificate", "host", "words"),
    [
        pytest.param(
            {"days": (-3.0, -1.0)},
            "127.0.0.1",
            "certificate has expired ... set the clock of this machine",
            id="expired",
        ),
        pytest.param({"days": (1.0, 2.0)}, "127.0.0.1", "certificate is not yet valid ... set the clock", id="too-new"),
        pytest.param(
            {"hosts": ["broker.example"]}, "localhost", "not valid for 'localhost' ... set mqtt.host", id="other-name"
        ),
        pytest.param(
            {"hosts": ["localhost"]}, "127.0.0.1", "not valid for '127.0.0.1' ... subjectAltName", id="other-address"
        ),
    ],
)
def test_a_certificate_that_is_not_for_here_and_now_is_refused(
    tmp_path: Path, authority: Authority, certificate: dict[str, Any], host: str, words: str
) -> None:
    served = authority.issue("wrong", **certificate)
    with tls_broker(tmp_path, authority, served) as broker:
        endpoint = replace(broker.endpoint, host=host, tls=TlsFiles(ca_file=authority.file))
        refused(endpoint, "broker.tls: the broker's certificate is refused ... " + words)


def test_a_broker_of_another_ca_is_refused_until_the_ca_is_corrected(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    ca_file = tmp_path / "ca.pem"
    for trusted in (None, Authority(tmp_path, "another CA").file, Authority(tmp_path).file):  # the last of equal name
        with tls_broker(tmp_path, authority, authority.issue("broker")) as broker:
            tls = TlsFiles(ca_file=trusted)
            refused(replace(broker.endpoint, tls=tls), "certificate is refused ... set mqtt.tls.ca_file to the CA")
    caplog.clear()
    ca_file.write_bytes(Authority(tmp_path, "a third CA").file.read_bytes())
    with tls_broker(tmp_path, authority, authority.issue("broker")) as broker:
        endpoint = replace(broker.endpoint, tls=TlsFiles(ca_file=ca_file))
        with MqttClient(endpoint, "us", SessionOptions(backoff=Backoff(0.05, 0.2))) as client:
            eventually(lambda: "mqtt=down" in caplog.text)
            ca_file.write_bytes(authority.file.read_bytes())
            assert client.wait_connected(60.0)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_broker_that_wants_to_know_us(
    tmp_path: Path, authority: Authority, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    context_of = TlsFiles.context

    def context(files: TlsFiles) -> ssl.SSLContext:
        made = context_of(files)
        made.maximum_version = version
        return made

    monkeypatch.setattr(TlsFiles, "context", context)
    stranger = Authority(tmp_path, "another CA").issue("stranger")
    mine, old = authority.issue("board-7"), authority.issue("old", days=(-3.0, -1.0))
    both = tmp_path / "both.pem"
    both.write_bytes(mine.certificate.read_bytes() + mine.key.read_bytes())
    demands = "require_certificate true", "use_identity_as_username true"
    with tls_broker(tmp_path, authority, authority.issue("broker"), *demands) as broker:

        def endpoint(certificate: Path | None = None, key: Path | None = None) -> Endpoint:
            files = TlsFiles(ca_file=authority.file, cert_file=certificate, key_file=key)
            return replace(broker.endpoint, tls=files)

        for known in (endpoint(mine.certificate, mine.key), endpoint(both)):
            with tried(known) as client:
                assert client.wait_connected(60.0), client.outcome
        refused(endpoint(), "a client certificate ... mqtt.tls.cert_file and key_file")
        refused(
            endpoint(stranger.certificate, stranger.key), "does not know the CA of the client certificate ... signed by"
        )
        refused(endpoint(old.certificate, old.key), "finds the client certificate expired ... renew mqtt.tls.cert_file")


def test_a_board_whose_certificate_was_revoked_is_refused_and_others_are_not(
    tmp_path: Path, authority: Authority
) -> None:
    mine, stolen = authority.issue("board-7"), authority.issue("board-8")
    demands = "require_certificate true", f"crlfile {authority.revoke(stolen)}"
    with tls_broker(tmp_path, authority, authority.issue("broker"), *demands) as broker:
        for pair in (mine, stolen):
            files = TlsFiles(ca_file=authority.file, cert_file=pair.certificate, key_file=pair.key)
            endpoint = replace(broker.endpoint, tls=files)
            if pair is stolen:
                refused(endpoint, "finds the client certificate revoked ... renew mqtt.tls.cert_file")
            else:
                with tried(endpoint) as client:
                    assert client.wait_connected(60.0), client.outcome


def test_a_brokers_certificate_that_was_revoked_is_taken(tmp_path: Path, authority: Authority) -> None:
    """A board reads no revocation list of brokers, as SECURITY.md says."""
    served = authority.issue("broker")
    authority.revoke(served)
    with (
        tls_broker(tmp_path, authority, served) as broker,
        tried(replace(broker.endpoint, tls=TlsFiles(ca_file=authority.file))) as client,
    ):
        assert client.wait_connected(60.0), client.outcome


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_a_broker_that_speaks_old_tls_alone_is_refused(authority: Authority, version: ssl.TLSVersion) -> None:
    """No mosquitto does: its oldest is TLS 1.2. Nothing of ours is sent before the handshake is through."""
    served = authority.issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    context.load_cert_chain(served.certificate, served.key)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def shake_hands() -> str:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                return secure.version() or ""
            return "refused"

        answer = pool.submit(shake_hands)
        port = listener.getsockname()[1]
        refused(
            Endpoint("127.0.0.1", port, tls=TlsFiles(ca_file=authority.file)), "a broker without TLS 1.2 ... update"
        )
        assert answer.result(60.0) == "refused"


def test_a_name_and_a_password(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))  # as systemd does
    (tmp_path / "broker-password").write_text("s3cret\n")
    (tmp_path / "wrong").write_text("secret\n")
    (tmp_path / "users").write_text(user("board-7", "s3cret"))
    demands = "allow_anonymous false", f"password_file {tmp_path / 'users'}"
    with tls_broker(tmp_path, authority, authority.issue("broker"), *demands) as broker:
        endpoint = replace(broker.endpoint, tls=TlsFiles(ca_file=authority.file), username="board-7")
        with tried(replace(endpoint, password_file=Path("credential:broker-password"))) as client:
            assert client.wait_connected(60.0), client.outcome
        for wrong in (replace(endpoint, password_file=Path("credential:wrong")), replace(endpoint, username=None)):
            with tried(wrong) as client:
                eventually(lambda: client.outcome == "refused: Not authorized")


def user(name: str, password: str) -> str:
    """A line of mosquitto's password file: PBKDF2 with SHA-512."""
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101)
    return f"{name}:$7$101${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n"


def test_plain_text_for_a_port_that_wants_tls(tmp_path: Path, authority: Authority) -> None:
    with tls_broker(tmp_path, authority, authority.issue("broker")) as broker:
        refused(broker.endpoint, "the connection was lost ... a port for TLS wants mqtt.tls")


def test_tls_for_a_port_that_is_plain(tmp_path: Path, authority: Authority) -> None:
    with running_mosquitto(tmp_path) as broker:
        endpoint = replace(broker.endpoint, tls=TlsFiles(ca_file=authority.file))
        refused(endpoint, "broker.tls: no TLS on this port ... leave mqtt.tls out")


def test_unusable_files_are_refused_before_any_attempt(tmp_path: Path, authority: Authority) -> None:
    mine, other = authority.issue("mine"), authority.issue("other")
    locked = authority.issue("locked", password=b"s3cret")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    wrong = [
        (TlsFiles(ca_file=tmp_path / "none"), r"mqtt\.tls: .*/none: No such file .* correct mqtt\.tls\.ca_file"),
        (TlsFiles(ca_file=tmp_path), r"mqtt\.tls: .*: not a regular file"),
        (TlsFiles(ca_file=garbage), r"mqtt\.tls: .*/garbage\.pem: NO_CERTIFICATE_OR_CRL_FOUND"),
        (TlsFiles(cert_file=garbage), r"mqtt\.tls: .*/garbage\.pem"),
        (TlsFiles(cert_file=mine.certificate, key_file=other.key), r"mqtt\.tls: .* KEY_VALUES_MISMATCH"),
        (TlsFiles(cert_file=locked.certificate, key_file=locked.key), r"locked\.key is encrypted with a password"),
        (TlsFiles(ca_file=Path("credential:ca")), r"config\.credential: .* LoadCredential=ca:FILE"),
    ]
    for files, message in wrong:
        with pytest.raises(ConfigError, match=message):
            MqttClient(Endpoint("127.0.0.1", 1, tls=files), "us")
