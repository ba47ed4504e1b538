"""Decide whose documents count: an operator's key signs commands, a release key signs the models that may run.

The two roles are separate, as in Uptane (https://uptane.org), where one repository says what exists and another what is
installed. Somebody with one key alone cannot bring a model of their own onto a board.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from agent.common.errors import CommandError, ConfigError
from agent.config import CommandsConfig
from agent.contract.signing import Keyring
from agent.contract.topics import Topics
from agent.system.clock import is_synchronised


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
            remedy = "make one for each with 'tared keys new', and keep them apart"
            raise ConfigError("key.roles", found, "two roles in different hands", remedy)

    @property
    def allows_unsigned(self) -> bool:
        """True if unsigned documents are admitted."""
        if self._config.unsigned is not None:
            return self._config.unsigned == "allow"
        return self._local and not self.has_keys

    @property
    def has_keys(self) -> bool:
        """True if any key is configured."""
        return bool(len(self.operators) or len(self.releases))

    @property
    def warning(self) -> str:
        """A warning for the start; empty if there is none."""
        if self.allows_unsigned and not self._local:
            return "commands.unsigned is 'allow': whoever may publish at the broker commands this board"
        if not self.allows_unsigned and not len(self.operators):
            return "no command is obeyed: there is no key in commands.operator_keys, and the broker is elsewhere"
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
        if self.allows_unsigned and (document.get("signature") is None or not len(self.operators)):
            return ""  # a signature that this board cannot check is treated as none
        if document.get("signature") is None:
            remedy = "sign it with 'tared send --sign KEY', or say 'unsigned: allow' in config.yaml"
            raise CommandError("command.unsigned", "no signature", "one of an operator's key", remedy)
        key = self.operators.signer_id(document)
        if key is None:
            expected = f"one by an operator's key that this board knows ({len(self.operators)} of them), over all of it"
            raise CommandError("command.signature", "another signature", expected, "sign it with such a key")
        if document.get("to") != self._to:
            found = f"signed for {str(document.get('to'))[:130]!a}"
            raise CommandError("command.target", found, f"for '{self._to}'", "sign one for each board")
        return key

    def check_clock(self) -> None:
        """Check that this board knows the time, to judge an expiry. Raises CommandError (`command.clock`)."""
        # An expired signature does no harm where everybody who reaches the broker may send unsigned commands.
        if (self._local and self.allows_unsigned) or self._config.clock == "trusted" or self._synchronised():
            return
        found = "a clock that follows no time server"
        remedy = "let the board reach one (chrony, systemd-timesyncd), or say 'clock: trusted' in config.yaml"
        raise CommandError("command.clock", found, "one that can tell whether a command has expired", remedy)
