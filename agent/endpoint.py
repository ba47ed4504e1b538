"""Where a broker listens, which way leads there, and how to introduce oneself."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent.credentials import located
from agent.errors import ConfigError
from agent.tls import TlsFiles

Protocol = Literal["auto", "5", "3.1.1"]
Transport = Literal["tcp", "websockets"]


@dataclass(frozen=True)
class Endpoint:
    """A broker, and what it is to know of us.

    tls: None for plain TCP. protocol: the version of MQTT; auto is 5, or 3.1.1 where the broker does not speak it.
    will_delay_s: only with MQTT 5, how long the broker waits for a lost client before it publishes the will.
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
        """Whether it goes over a network as it is."""
        return self.password_file is not None and self.tls is None and not is_loopback(self.host)

    def password(self) -> str | None:
        """The first line of the password file. Raises ConfigError (`mqtt.password`, `config.credential`)."""
        if self.password_file is None:
            return None
        try:
            return located(self.password_file).read_text(encoding="utf-8").partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            remedy = "correct mqtt.password_file, or its permissions"
            raise ConfigError("mqtt.password", str(error), "a readable text file", remedy) from error


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches the broker there, by its address; None is the embedded one."""
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name that a resolver could lead anywhere
        return False
