"""Who may say what: operators that something is done, releases what may run, and neither the other's part.

As in Uptane (https://uptane.org), where one repository says what exists and another what is installed: whoever has one
key alone cannot bring a model of their own onto a board.
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
    """What a board lets be said to it over MQTT.

    topics: the board's own, which a signed document has to name in `to`: signed for another board it is no order for
    this one. local: whether only this machine reaches the broker. Raises ConfigError: `key.roles` for a key that is in
    both roles, `key.unreadable`, `config.credential`.
    """

    def __init__(
        self, config: CommandsConfig, topics: Topics, local: bool, synchronised: Callable[[], bool] = is_synchronised
    ) -> None:
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
    def unsigned(self) -> bool:
        """Whether unsigned documents count."""
        if self._config.unsigned is not None:
            return self._config.unsigned == "allow"
        return self._local and not self.guarded

    @property
    def guarded(self) -> bool:
        """Whether there are keys at all."""
        return bool(len(self.operators) or len(self.releases))

    @property
    def warning(self) -> str:
        """What is to be told at the start, empty where nothing is."""
        if self.unsigned and not self._local:
            return "commands.unsigned is 'allow': whoever may publish at the broker commands this board"
        if not self.unsigned and not len(self.operators):
            return "no command is obeyed: there is no key in commands.operator_keys, and the broker is elsewhere"
        return ""

    @property
    def described(self) -> dict[str, JsonValue]:
        """As the board's birth tells it; `unsigned` where that was chosen towards a broker elsewhere: whoever watches a
        fleet wants to know."""
        return {
            "operator_keys": [*sorted(self.operators.ids)],
            "release_keys": [*sorted(self.releases.ids)],
            "unsigned": self.unsigned and not self._local,
        }

    def trusts(self, key: str) -> bool:
        """Whether what this key said before still counts; an empty one stands for unsigned.

        What a key has said that is trusted no more counts no more: with a stolen one somebody could have said the
        highest of versions, to which no honest one would ever be an answer.
        """
        return key in self.operators.ids if key else self.unsigned

    def admit(self, document: Mapping[str, Any]) -> str:
        """The id of the operator's key that signed this document for this board; empty for an unsigned one.

        Raises CommandError: `command.unsigned`, `command.signature`, `command.target`.
        """
        if self.unsigned and (document.get("signature") is None or not len(self.operators)):
            return ""  # a signature that nobody here can check is worth no less than none
        if document.get("signature") is None:
            remedy = "sign it with 'tared send --sign KEY', or say 'unsigned: allow' in config.yaml"
            raise CommandError("command.unsigned", "no signature", "one of an operator's key", remedy)
        key = self.operators.signer(document)
        if key is None:
            expected = f"one by an operator's key that this board knows ({len(self.operators)} of them), over all of it"
            raise CommandError("command.signature", "another signature", expected, "sign it with such a key")
        if document.get("to") != self._to:
            found = f"signed for {str(document.get('to'))[:130]!a}"
            raise CommandError("command.target", found, f"for '{self._to}'", "sign one for each board")
        return key

    def check_clock(self) -> None:
        """Before an expiry is judged. Raises CommandError (`command.clock`) where this board does not know the time."""
        # Only where whoever reaches the broker may say anything unsigned is nothing lost with an expired signature.
        if (self._local and self.unsigned) or self._config.clock == "trusted" or self._synchronised():
            return
        found = "a clock that follows no time server"
        remedy = "let the board reach one (chrony, systemd-timesyncd), or say 'clock: trusted' in config.yaml"
        raise CommandError("command.clock", found, "one that can tell whether a command has expired", remedy)
