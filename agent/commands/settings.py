"""Change keys of config.yaml at run time, on an operator's command or by the retained document `desired`.

`Settings` keeps the values over restarts, under a version that only rises. `admit_desired`, `parse_desired` and
`check_expiry` read the document `desired`, in this order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import JsonValue, ValidationError

from agent.commands.authority import Authority
from agent.commands.dispatcher import Authorisation, failure
from agent.common.errors import AgentError, CommandError
from agent.common.state_files import parse_state
from agent.config import Config
from agent.contract.commands import Desired, Reported
from agent.contract.wire import MessageError, describe_errors, read_object
from agent.state.salvage import Row
from agent.state.store import StateStore

log = logging.getLogger(__package__)

# Keys that are read at each use. All others are read once, when something is built from them.
LIVE = (
    "log_level",
    "mqtt.telemetry_period_s",
    "recalibration.automatic",
    "recalibration.raise_precision",
    "recalibration.max_loss",
    "recalibration.max_slowdown",
    "privacy.preview",
)
_IN_FORCE = {"recalibration.max_loss": "max_loss"}  # the value that holds where config.yaml leaves it open
# Narrower than config.yaml's: nobody may silence a board from afar, or have it flood its broker.
_BOUNDS = {"mqtt.telemetry_period_s": (0.5, 3600.0)}
_ONLY_OFF = ("privacy.preview",)  # what may be seen is for the board's owner to permit, in config.yaml


@dataclass(eq=False)
class Settings:
    """The configuration in force: config.yaml, overlaid with the values that commands have set.

    Values are ignored if they are unreadable, no longer allowed, or set by a key that is no longer trusted.

    Args:
        base: As config.yaml has it. `config` is the configuration in force.
        trusts: Returns whether earlier documents of a key still count.
        on_change: Receives each new configuration.
    """

    base: Config
    state: StateStore
    trusts: Callable[[str], bool]
    on_change: Callable[[Config], None]

    def __post_init__(self) -> None:
        self.config = self.base
        self._values: dict[str, JsonValue] = {}
        self._signers: dict[str, str] = {}  # by name of the value: the key that has set it, empty for none
        # The highest version of each key.
        self._versions: dict[str, int] = self.state.read("settings_versions", lambda rows: dict(rows)) or {}
        self.state.read("settings", self._restore)
        for key, value in list(self._values.items()):
            try:
                self.config = _with(self.config, {key: value})
            except CommandError as error:  # noqa: PERF203  (only this value does not fit config.yaml any more)
                self.state.report(error)
                del self._values[key], self._signers[key]

    @property
    def version(self) -> int:
        """The highest version set by a key that is still trusted; 0 without any."""
        return max((version for key, version in self._versions.items() if self.trusts(key)), default=0)

    def reported(self, error: AgentError | None = None) -> Reported:
        """Return the values in force; error: the reason for which the newest `desired` is not."""
        values = {key: attrgetter(_IN_FORCE.get(key, key))(self.config) for key in LIVE}
        return Reported(version=self.version, values=values, error=failure(error) if error is not None else None)

    def set(self, values: Mapping[str, JsonValue], authorisation: Authorisation, whole: bool = False) -> None:
        """Write the values down, then apply them. None as a value restores that of config.yaml.

        whole: values that are not named are restored too.

        Raises CommandError:
            command.version     the version is not above the latest one: an old document that somebody has kept
            command.set         an unknown key, or a value that is not allowed
        Raises AgentError: `state.write`.
        """
        if authorisation.version <= self.version:
            found = f"version {authorisation.version}"
            expected = f"a version above {self.version}, the version in force"
            raise CommandError("command.version", found, expected, "send the settings with a higher version")
        requested = {**({} if whole else self._values), **values}
        requested = {key: value for key, value in requested.items() if value is not None}
        for key in values:
            if key not in LIVE:
                found, expected = f"the key '{key[:64]}'", "one of " + ", ".join(LIVE)
                raise CommandError("command.set", found, expected, "change config.yaml, and restart the daemon")
        config = _with(self.base, requested)
        signers = {key: authorisation.key if key in values else self._signers[key] for key in requested}
        versions = {
            **self._versions,
            authorisation.key: max(authorisation.version, self._versions.get(authorisation.key, 0)),
        }
        rows = [(key, json.dumps(value), signers[key]) for key, value in requested.items()]
        self.state.replace({"settings": rows, "settings_versions": list(versions.items())})
        self._values, self._signers, self._versions, self.config = requested, signers, versions, config
        self.on_change(config)

    def _restore(self, rows: Sequence[Row]) -> bool:
        """Take over the values that were kept, but for those set by a key that is no longer trusted."""
        values = {key: parse_state(value) for key, value, _ in rows if key in LIVE}
        signers = {key: signer for key, _, signer in rows}
        revoked = [key for key in values if not self.trusts(signers[key])]
        if revoked:
            log.warning("settings=dropped keys=%s reason='set by a key that is no longer trusted'", ",".join(revoked))
        self._values = {key: value for key, value in values.items() if key not in revoked}
        self._signers = {key: signers[key] for key in self._values}
        return True


def _with(config: Config, values: Mapping[str, JsonValue]) -> Config:
    """Return the configuration with these values, validated. Raises CommandError (`command.set`)."""
    content = dict(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section:
            content[section] = {**dict(content[section]), name: value}
        else:
            content[name] = value
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        expected = "values that config.yaml accepts"
        raise CommandError("command.set", describe_errors(error), expected, "correct them") from None
    for key in _ONLY_OFF:
        if values.get(key, False) is not False:
            found, expected = f"{key} {values[key]}", "false, or null for the value of config.yaml"
            raise CommandError("command.set", found, expected, "let the board's owner set it in config.yaml")
    for key, value in ((key, attrgetter(key)(config)) for key in _BOUNDS.keys() & values.keys()):
        least, most = _BOUNDS[key]
        if not isinstance(value, (int, float)) or not least <= value <= most:
            raise CommandError("command.set", f"{key} {value}", f"{least:g} to {most:g}", "correct it")
    return config


def admit_desired(payload: bytes, authority: Authority | None) -> tuple[dict[str, Any], str]:
    """Return the document and the id of the key that signed it, empty for an unsigned one.

    Raises MessageError, and CommandError as `Authority.admit`.
    """
    document = read_object(payload)
    return document, authority.admit(document) if authority is not None else ""


def parse_desired(document: dict[str, Any], key: str) -> Desired:
    """Parse a document that was admitted with this key. Raises MessageError (`message.invalid`).

    A signed document has to expire. Otherwise somebody could hold one back, and deliver it when it does harm.
    """
    try:
        desired = Desired.model_validate(document)
    except ValidationError as error:
        found, expected = describe_errors(error), "version and values"
        raise MessageError("message.invalid", found, expected, "correct the sender") from None
    if key and desired.expires is None:
        found, remedy = "a signed document without 'expires'", "sign it with 'expires' in Unix seconds"
        raise MessageError("message.invalid", found, "a time of expiry, after which boards refuse the document", remedy)
    return desired


def check_expiry(desired: Desired, now: float, authority: Authority | None) -> None:
    """`now` is Unix time in seconds. Raises CommandError (`command.clock`, `command.expired`)."""
    if desired.expires is not None:
        if authority is not None:
            authority.check_clock()
        if now >= desired.expires:
            found = f"expired {now - desired.expires:.1f} s ago by this clock"
            raise CommandError("command.expired", found, "a document whose expiry lies ahead", "publish it again")
