"""Run the pages until a signal: `tared web`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.common.credentials import locate
from agent.common.errors import AgentError, ConfigError
from agent.common.heap import limit_malloc_arenas
from agent.common.http.addresses import http_url, is_loopback, is_unspecified, split_address
from agent.common.http.reception import listen
from agent.contract.signing import Signer
from agent.mqtt.client import Endpoint
from calibrate.errors import install_extra

if TYPE_CHECKING:
    from fleet.web.boards import LiveBoards

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_SHORTEST_PASSWORD = 12
_MOST_CONNECTIONS = 100
_KEEP_ALIVE_S = 10
_END_S = 2


@dataclass(frozen=True)
class Listen:
    """The address at which the pages are served. names: further names under which browsers may call them."""

    host: str
    port: int
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, names: tuple[str, ...] = ()) -> Listen:
        """Parse `HOST:PORT`. Raises ConfigError (`web.listen`)."""
        address = split_address(text)
        if address is None or not address[0]:
            raise ConfigError("web.listen", f"--listen {text!a}", "an address such as 127.0.0.1:8470", "correct it")
        return cls(*address, names)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which browsers may call the pages, without the port."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        return (*_LOOPBACK_HOSTS, *(() if is_unspecified(self.host) else (own,)), *self.names)


def run_web(
    endpoint: Endpoint,
    fleet: str,
    address: Listen,
    password_file: Path | None,
    signer: Signer | None,
    announce: Callable[[str], None],
    *,
    db: str | None = None,
    files: Path | None = None,
    metrics: Callable[[LiveBoards], AbstractContextManager[None]] = lambda _boards: nullcontext(),
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        announce: Called with the address once the pages are served.
        db: The fleet's store, as `open_existing`; None: boards are shown live, and nothing else.
        files: A folder of what rollouts may send; None: they send none.
        metrics: Serves the metrics of the boards while the block runs.

    Raises AgentError: `web.missing` without the extra, `web.password` for an address that others can reach without a
    password, `web.listen` for one that cannot be listened on, `web.files` for a folder that is none.
    """
    try:
        import uvicorn

        from fleet.web.boards import LiveBoards
        from fleet.web.orders import Orders
        from fleet.web.room import FleetRoom
        from fleet.web.server import PageServer, WebOptions, create_app
    except ImportError as error:
        remedy = install_extra("web")
        raise AgentError("web.missing", str(error), "starlette and uvicorn", remedy) from error
    limit_malloc_arenas()
    password = _password(address, password_file)
    options = WebOptions(address.hosts, password)
    if db is not None and files is not None and not files.is_dir():
        found = f"--files {files}"
        raise ConfigError("web.files", found, "a folder of models and calibrations", "correct --files")
    with ExitStack() as stack:
        room = stack.enter_context(FleetRoom(db, fleet, files)) if db is not None else None
        boards = stack.enter_context(LiveBoards(endpoint, fleet))
        stack.enter_context(metrics(boards))
        app = create_app(boards, Orders(endpoint, fleet, signer), options, room)
        config = uvicorn.Config(
            app,
            host=address.host,
            port=address.port,
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_S,
        )
        listener = bound(address)
        with listener:
            announce(http_url(*listener.getsockname()[:2]))
            with suppress(KeyboardInterrupt):  # the server raises the signal again that it has ended by
                PageServer(config, options).run(sockets=[listener])


def bound(address: Listen) -> socket.socket:
    """Return a socket on which browsers wait from here on, and are not refused. Raises AgentError (`web.listen`)."""
    try:
        return listen(address.host, address.port)
    except OSError as error:
        found = f"{address.host}:{address.port}: {error.strerror or error}"
        raise AgentError("web.listen", found, "an address of this machine that is free", "choose another") from error


def _password(address: Listen, file: Path | None) -> str:
    if file is None:
        if not is_loopback(address.host):
            found = f"--listen {address.host}, which other machines can reach, without a password"
            remedy = "write a password into a file, and name it with --web-password-file"
            raise AgentError("web.password", found, "a password that browsers must send", remedy)
        return ""
    try:
        password = locate(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(
            "web.password", f"{file}: {error}", "a readable file", "correct --web-password-file"
        ) from error
    if len(password) < _SHORTEST_PASSWORD:
        found, expected = f"{len(password)} characters in {file}", f"at least {_SHORTEST_PASSWORD}"
        raise AgentError("web.password", found, expected, "choose a longer password")
    return password
