"""Decide whose documents count: an operator's key signs commands, a release key signs the models that may run.

The two roles are separate, as in Uptane (https://uptane.org), where one repository says what exists and another what is
installed. Somebody with one key alone cannot bring a model of their own onto a board. `Authority` holds the keys of
both; `Releases` decides which models may run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from agent.common.errors import AgentError, CommandError, ConfigError
from agent.config import CommandsConfig
from agent.contract.commands import ModelArgs, Release
from agent.contract.signing import Keyring
from agent.contract.topics import Topics
from agent.contract.wire import describe_errors
from agent.state.store import StateStore
from agent.system.board import is_synchronised


class Authority:
    """The keys that one board trusts, and its rules for unsigned documents."""

    def __init__(
        self, config: CommandsConfig, topics: Topics, local: bool, synchronised: Callable[[], bool] = is_synchronised
    ) -> None:
        """Read the keys.

        Args:
            topics: The board's own. A signed document names its board in `to`; signed for another one it is refused.
            local: Whether only this machine reaches the broker.
            synchronised: Returns whether the clock follows a time server.

        Raises ConfigError: `key.roles` for a key in both roles, `key.unreadable`, `config.credential`.
        """
        self._config = config
        self._to = f"{topics.fleet}/{topics.device}"
        self._local = local
        self._synchronised = synchronised
        self.operators = Keyring(config.operator_keys)
        self.releases = Keyring(config.release_keys)
        self.product = config.product
        if both := self.operators.ids & self.releases.ids:
            found = f"key {min(both)} among operator_keys and release_keys"
            remedy = "make one key for each role with 'tared keys new', and keep the two keys apart"
            raise ConfigError("key.roles", found, "a different key for each of the two roles", remedy)

    @property
    def allows_unsigned(self) -> bool:
        """True if unsigned documents are admitted."""
        if self._config.unsigned is not None:
            return self._config.unsigned == "allow"
        return self._local and not self.has_keys

    @property
    def has_keys(self) -> bool:
        """True if any key is configured."""
        return bool(self.operators.ids | self.releases.ids)

    @property
    def warning(self) -> str:
        """A warning for the start; empty if there is none."""
        if self.allows_unsigned and not self._local:
            return "commands.unsigned is 'allow': everyone who may publish at the broker can command this board"
        if not self.allows_unsigned and not self.operators.ids:
            return "every command is refused: commands.operator_keys has no key, and the broker is on another machine"
        return ""

    @property
    def description(self) -> dict[str, JsonValue]:
        """The keys as the board's birth lists them.

        `unsigned` is true only if that was chosen for a broker elsewhere: a control room has to know.
        """
        return {
            "operator_keys": [*sorted(self.operators.ids)],
            "release_keys": [*sorted(self.releases.ids)],
            "unsigned": self.allows_unsigned and not self._local,
        }

    def trusts(self, key: str) -> bool:
        """Return whether earlier documents of this key still count; an empty key stands for unsigned ones.

        Versions set by a revoked key are ignored. Otherwise a thief could publish the highest possible version and lock
        the board.
        """
        return key in self.operators.ids if key else self.allows_unsigned

    def admit(self, document: Mapping[str, Any]) -> str:
        """Return the id of the operator's key that signed this document for this board; empty for an unsigned one.

        Raises CommandError: `command.unsigned`, `command.signature`, `command.target`.
        """
        if self.allows_unsigned and (document.get("signature") is None or not self.operators.ids):
            return ""  # a signature that this board cannot check is treated as none
        if document.get("signature") is None:
            remedy = "sign the command with 'tared send --sign KEY', or set 'unsigned: allow' in config.yaml"
            raise CommandError("command.unsigned", "no signature", "a signature by an operator's key", remedy)
        key = self.operators.signer_id(document)
        if key is None:
            known = f"one of the {len(self.operators.ids)} operators' keys that this board knows"
            found, expected = "a signature that does not match", f"a signature over the whole document by {known}"
            raise CommandError("command.signature", found, expected, "sign it with one of these keys")
        if document.get("to") != self._to:
            found, expected = f"a signature for {str(document.get('to'))[:130]!a}", f"a signature for '{self._to}'"
            raise CommandError("command.target", found, expected, "sign a separate document for each board")
        return key

    def check_clock(self) -> None:
        """Check that this board knows the time, to judge an expiry. Raises CommandError (`command.clock`)."""
        # An expired signature does no harm where everybody who reaches the broker may send unsigned commands.
        if (self._local and self.allows_unsigned) or self._config.clock == "trusted" or self._synchronised():
            return
        found = "a clock that follows no time server"
        remedy = "let the board reach a time server (chrony, systemd-timesyncd), or set 'clock: trusted' in config.yaml"
        raise CommandError("command.clock", found, "a clock that shows whether a command has expired", remedy)


class Releases:
    """Check releases, and remember the highest installed version of each key.

    So an older release, validly signed once, is not a way back to its faults. Where the versions were lost by damage,
    no model is accepted, since any version could be a step back.

    damage: the error that says so; None if they are known.
    """

    def __init__(self, authority: Authority | None, state: StateStore) -> None:
        """authority: None requires no release."""
        self._authority = authority
        self._state = state
        self.damage: AgentError | None = None
        self._versions: dict[str, int] = state.read("releases", lambda rows: dict(rows)) or {}
        aside = state.lost_in("releases")
        if aside is not None and authority is not None and authority.has_keys:
            found, expected = (
                f"the versions of the releases cannot be read from {aside}",
                "the versions of the releases",
            )
            remedy = f"restore {state.path}, or remove {aside} if nobody can send an older release; then restart"
            self.damage = AgentError("state.damaged", found, expected, remedy)

    def check(self, args: ModelArgs, now: float) -> tuple[Release, str] | None:
        """Return the release that allows this model, and the id of its key; None if no release is required.

        now: Unix time in seconds.

        Raises CommandError:
            command.release     no release, or one of another model or product, by another key, or expired
            command.rollback    a lower version than one installed before, by a key that is still trusted
        Raises AgentError: `state.damaged`.
        """
        if self._authority is None or not self._authority.has_keys:
            return None
        if self.damage is not None:
            raise self.damage
        key = self._authority.releases.signer_id(args.release) if args.release is not None else None
        if args.release is None or key is None:
            found = "no release" if args.release is None else "a release whose signature does not match"
            expected = "a release signed by a release key that this board knows; an operator's key is not one"
            raise _not_released(found, expected, "make one with 'tared release'")
        try:
            release = Release.model_validate(args.release)
        except ValidationError as error:
            found, remedy = describe_errors(error), "make a new release statement"
            raise _not_released(found, "a release statement", remedy) from None
        if (release.sha256, release.size) != (args.sha256, args.size):
            found = f"a release of {release.sha256[:12]}, {release.size} bytes"
            expected = f"a release of {args.sha256[:12]}, {args.size} bytes"
            raise _not_released(found, expected, "send the release of this model")
        if release.product != self._authority.product:
            found, expected = (
                f"a release for {'boards of ' + name if name else 'boards without a product'}"
                for name in (release.product, self._authority.product)
            )
            raise _not_released(found, expected, "see commands.product, and 'tared release --product'")
        if not release.issued <= release.expires or now >= release.expires:
            found = f"a release that expired {now - release.expires:.0f} s ago"
            remedy = "sign the release again with 'tared release'"
            raise _not_released(found, "a release whose expiry lies ahead", remedy)
        trusted = self._authority.releases.ids
        highest = max((version for known, version in self._versions.items() if known in trusted), default=0)
        if release.version < highest:
            found, expected = f"version {release.version}", f"at least {highest}, the highest version accepted before"
            raise CommandError("command.rollback", found, expected, "release the model again under a higher version")
        return release, key

    def record(self, release: Release, key: str) -> None:
        """Record the release before its model is installed. Raises AgentError (`state.write`)."""
        versions = {**self._versions, key: max(release.version, self._versions.get(key, 0))}
        self._state.replace({"releases": list(versions.items())})
        self._versions = versions


def _not_released(found: str, expected: str, remedy: str) -> CommandError:
    return CommandError("command.release", found, expected, remedy)
