"""Share options among the control room's commands: broker, database, operator's key, metrics; end by a signal."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import number, option

if TYPE_CHECKING:  # imported when a command runs, as in agent/cli/offline.py
    from _typeshed import DataclassInstance
    from prometheus_client.registry import Collector

    from agent.contract.signing import Signer
    from agent.mqtt.config import MqttConfig
    from agent.mqtt.endpoint import Endpoint, TlsFiles

_DB = "the fleet's store: SQLite's file, postgresql://USER@HOST/DATABASE, or credential:NAME, a file with one of these"
_TLS_FILES = ("ca_file", "cert_file", "key_file")


def add_database_option(parser: argparse.ArgumentParser, default: str | None = "fleet.sqlite") -> None:
    """Add --db, the fleet's database."""
    database = _DB if default else f"{_DB} (default: none)"
    option(parser, "--db", "FILE_OR_URL", database, default=default)


def add_sign_option(parser: argparse.ArgumentParser) -> None:
    """Add --sign, for `signer_from`."""
    option(parser, "--sign", "KEY", "an operator's private key, of 'tared keys new' (default: unsigned)", Path)


def signer_from(options: argparse.Namespace) -> Signer | None:
    """Return the signer with the key that --sign names; None without it.

    Raises ConfigError (`key.unreadable`, `key.mode`) for a key that cannot be used.
    """
    from agent.contract.signing import Signer

    return Signer(options.sign) if options.sign is not None else None


def add_metrics_options(parser: argparse.ArgumentParser) -> None:
    """Add --metrics and --metrics-name, for `serving_metrics`."""
    address = "serve metrics for Prometheus there, at /metrics, without a password (default: none)"
    option(parser, "--metrics", "HOST:PORT", address)
    name = "a further name by which Prometheus may ask for them; may be repeated (default: none)"
    option(parser, "--metrics-name", "HOST", name, action="append", default=[])


@contextmanager
def serving_metrics(
    options: argparse.Namespace, program: str, collectors: Callable[[], Sequence[Collector]]
) -> Iterator[None]:
    """Serve the metrics of a program while the block runs, if the options say where.

    Without --metrics nothing is imported for it.

    Args:
        program: The label `program` of all metrics.
        collectors: Makes the collectors, when they are needed.

    Raises ConfigError (`metrics.address`, `metrics.port`).
    """
    if options.metrics is None:
        yield
        return
    from agent.common.metrics import MetricsAddress, MetricsServer

    address = MetricsAddress.parse(options.metrics, tuple(options.metrics_name))
    with MetricsServer(address, {"program": program}, *collectors()):
        yield


def run_until_signalled(
    run: Callable[[Callable[[], bool]], object],
    title: str,
    total: int | None,
    show: Callable[[], tuple[int, str]],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Call `run` until SIGTERM, SIGINT or `is_over`, and show its progress.

    Args:
        run: Gets a function that returns True once it shall stop; it calls this often.
        total: The number that the progress ends at; None: unknown.
        show: Returns the number reached, and a note for people.
        is_over: Returns True once there is nothing more to do.
    """
    from agent.common.console import progress
    from agent.system.process import ending_in_time, handling_signals

    signalled = threading.Event()
    with ending_in_time(), handling_signals(lambda _: signalled.set()), progress(title, total) as bar:

        def stopping() -> bool:
            bar.update(*show())
            return signalled.is_set() or is_over()

        run(stopping)


def field_values(options: argparse.Namespace, kind: type[DataclassInstance]) -> dict[str, Any]:
    """Return the values of the options that have the name of a dataclass's field."""
    return {each.name: getattr(options, each.name) for each in fields(kind) if hasattr(options, each.name)}


def add_broker_options(parser: argparse.ArgumentParser, fleet: str = "default") -> None:
    """Add the options for `endpoint_from`, `fleet_from` and `fleets_from`.

    Args:
        parser: The command's.
        fleet: The default fleet, in words for the help.
    """
    broker = parser.add_argument_group("broker", "options given here replace those of the configuration")
    option(broker, "-c --config", "FILE", "take all this from the mqtt section of a config.yaml (default: none)", Path)
    option(broker, "--host", "HOST", "the broker's name or address (default: 127.0.0.1)")
    option(broker, "--port", "PORT", "its port (default: 1883)", number(int, 1, 65535))
    option(broker, "--fleet", "FLEET", f"the fleet of the devices (default: {fleet})")
    option(broker, "--username", "NAME", "the user name at the broker (default: none)")
    option(broker, "--password-file", "FILE", "a file whose first line is the password (default: no password)", Path)
    broker.add_argument("--tls", action="store_true", help="TLS; the broker's certificate is of a CA the system trusts")
    authority = "TLS; the CA that signed the broker's certificate (default: those the system trusts)"
    option(broker, "--ca-file", "PEM", authority, Path)
    option(broker, "--cert-file", "PEM", "TLS; the certificate that the broker knows you by (default: none)", Path)
    option(broker, "--key-file", "PEM", "its private key, unencrypted (default: none)", Path)


def endpoint_from(options: argparse.Namespace) -> Endpoint:
    """Return the broker that the options name.

    Raises ConfigError for a configuration that cannot be used.
    """
    names = ("host", "port", "username", "password_file")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    configured = _mqtt_config(options).endpoint()
    endpoint = replace(configured, tls=_tls(options, configured.tls), **given)
    if endpoint.exposes_password:
        from agent.common.console import say

        say("warning: the broker's password crosses the network unencrypted; use --tls, or --ca-file")
    return endpoint


def fleet_from(options: argparse.Namespace) -> str:
    """Return the fleet that the options name.

    Raises ConfigError for a configuration that cannot be used, and (`mqtt.name`) for a name that no topic may contain.
    """
    if options.fleet is None:
        return _mqtt_config(options).fleet
    from agent.contract.topics import Topics

    return Topics(options.fleet, "any").fleet


def fleets_from(options: argparse.Namespace) -> str | None:
    """Return the fleet, as `fleet_from` does; None, for all fleets, if neither a name nor a configuration is given."""
    return None if options.fleet is None and options.config is None else fleet_from(options)


def _mqtt_config(options: argparse.Namespace) -> MqttConfig:
    from agent.mqtt.config import MqttConfig, read_mqtt_config

    return MqttConfig() if options.config is None else read_mqtt_config(options.config)


def _tls(options: argparse.Namespace, configured: TlsFiles | None) -> TlsFiles | None:
    from agent.common.schema import validate
    from agent.mqtt.endpoint import TlsFiles

    given = {name: getattr(options, name) for name in _TLS_FILES if getattr(options, name) is not None}
    if not given:
        return TlsFiles() if options.tls and configured is None else configured
    return validate(TlsFiles, {**(dict(configured) if configured else {}), **given}, "the command line")
