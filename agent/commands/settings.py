"""What operators have set at run time: keys of config.yaml that hold on after a restart, under a version that rises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from agent.commands.authority import Authority
from agent.commands.dispatcher import Authorisation, failure
from agent.common.errors import AgentError, CommandError
from agent.common.state_files import StateFile
from agent.config import Config
from agent.contract.commands import Desired, Reported
from agent.contract.wire import MessageError, problems, read_object

log = logging.getLogger(__package__)

# Keys whose readers look at them each time. Any other is read once, when something is built from it.
LIVE = (
    "log_level",
    "mqtt.telemetry_period_s",
    "recalibration.automatic",
    "recalibration.raise_precision",
    "recalibration.max_loss",
    "recalibration.max_slowdown",
)
# Narrower than config.yaml's: who sends a board to sleep, or has it flood its broker, does so from afar.
_BOUNDS = {"mqtt.telemetry_period_s": (0.5, 3600.0)}
_SCHEMA = 1


class Settings:
    """`config` is what config.yaml says and, above it, what was set; `on_change` hears of another one.

    trusts: whether what a key has said before still counts. Raises AgentError (`settings.schema`) for the file of a
    newer tared. What cannot be understood of the file, is allowed no more, or was set by a key that is trusted no
    more, is as if it had not been set.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        trusts: Callable[[str], bool],
        on_change: Callable[[Config], None],
        on_error: Callable[[AgentError], None],
    ) -> None:
        self._base = self.config = config
        self._trusts = trusts
        self._on_change = on_change
        self._values: dict[str, JsonValue] = {}
        self._signers: dict[str, str] = {}  # the key, empty for none, that has set each of the values
        self._versions: dict[str, int] = {}  # the highest of each key
        self._file = StateFile(path, _SCHEMA, "settings.write", on_error)
        self._file.read(self._take)
        for key, value in list(self._values.items()):
            try:
                self.config = _with(self.config, {key: value})
            except CommandError as error:  # noqa: PERF203  one that does not fit config.yaml any more, not all
                on_error(error)
                del self._values[key], self._signers[key]

    @property
    def version(self) -> int:
        """The highest that a key which is still trusted has set; 0 where none has."""
        return max((version for key, version in self._versions.items() if self._trusts(key)), default=0)

    def reported(self, error: AgentError | None = None) -> Reported:
        """What holds now; error: why the newest `desired` does not."""
        values = {key: _value(self.config, key) for key in LIVE}
        return Reported(version=self.version, values=values, error=failure(error) if error is not None else None)

    def set(self, values: Mapping[str, JsonValue], mandate: Authorisation, whole: bool = False) -> None:
        """From now on, and written down before that. None as a value: as config.yaml has it; whole: so is what is not
        named.

        Raises CommandError: `command.version` for one that does not exceed the one before, an old document that
        somebody has kept; `command.set` for a key or a value that cannot be; AgentError (`settings.write`).
        """
        if mandate.version <= self.version:
            found, expected = f"version {mandate.version}", f"one above {self.version}, which was set before"
            raise CommandError("command.version", found, expected, "send it with a higher version")
        wanted = {**({} if whole else self._values), **values}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        for key in values:
            if key not in LIVE:
                found, expected = f"the key '{key[:64]}'", "one of " + ", ".join(LIVE)
                raise CommandError("command.set", found, expected, "change config.yaml, and restart the daemon")
        config = _with(self._base, wanted)
        signers = {key: mandate.key if key in values else self._signers[key] for key in wanted}
        versions = {**self._versions, mandate.key: max(mandate.version, self._versions.get(mandate.key, 0))}
        latest = {"version": mandate.version, "key": mandate.key}
        self._file.replace({**latest, "values": wanted, "signers": signers, "versions": versions})
        self._values, self._signers, self._versions, self.config = wanted, signers, versions, config
        self._on_change(config)

    def _take(self, document: Mapping[str, Any]) -> None:
        """Before signers and versions were kept there was the latest key alone, which counts for all."""
        version, latest = int(document["version"]), str(document["key"])
        values = {str(key): value for key, value in dict(document["values"]).items() if key in LIVE}
        named = dict(document.get("signers", {}))
        signers = {key: str(named.get(key, latest)) for key in values}
        versions = {str(key): int(each) for key, each in document.get("versions", {latest: version}).items()}
        revoked = [key for key in values if not self._trusts(signers[key])]
        if revoked:
            log.warning("settings=dropped keys=%s reason='set by a key that is trusted no more'", ",".join(revoked))
        self._values = {key: value for key, value in values.items() if key not in revoked}
        self._signers, self._versions = {key: signers[key] for key in self._values}, versions


def _value(config: Config, key: str) -> JsonValue:
    section, _, name = key.rpartition(".")
    value: JsonValue = getattr(getattr(config, section) if section else config, name)
    return value


def _with(config: Config, values: Mapping[str, JsonValue]) -> Config:
    """The configuration with these values, as its schema has them. Raises CommandError (`command.set`)."""
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
        raise CommandError(
            "command.set", problems(error), "values that config.yaml could have", "correct them"
        ) from None
    for key in _BOUNDS.keys() & values.keys():
        (least, most), found = _BOUNDS[key], _value(config, key)
        if not isinstance(found, (int, float)) or not least <= found <= most:
            raise CommandError("command.set", f"{key} {found}", f"{least:g} to {most:g}", "correct it")
    return config


def admit_desired(payload: bytes, authority: Authority | None) -> tuple[dict[str, Any], str]:
    """The document, and the id of the key that signed it, empty where none did.

    Raises MessageError, and CommandError as `Authority.admit`.
    """
    document = read_object(payload)
    return document, authority.admit(document) if authority is not None else ""


def parse_desired(document: dict[str, Any], key: str) -> Desired:
    """What was admitted with this key. Raises MessageError (`message.invalid`).

    A signed document says until when it may be taken up: without that whoever kept one back could let it through when
    it does harm.
    """
    try:
        desired = Desired.model_validate(document)
    except ValidationError as error:
        raise MessageError("message.invalid", problems(error), "version and values", "correct the sender") from None
    if key and desired.expires is None:
        found, remedy = "a signed document without 'expires'", "sign it with a time, Unix seconds"
        raise MessageError("message.invalid", found, "one that says until when it may be taken up", remedy)
    return desired


def check_expiry(desired: Desired, now: float, authority: Authority | None) -> None:
    """`now` is Unix time in seconds. Raises CommandError (`command.clock`, `command.expired`)."""
    if desired.expires is not None:
        if authority is not None:
            authority.check_clock()
        if now >= desired.expires:
            found = f"expired {now - desired.expires:.1f} s ago by this clock"
            raise CommandError("command.expired", found, "a valid document", "publish it anew")
