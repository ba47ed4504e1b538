"""A TCP proxy on loopback that does to connections what networks do."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from dataclasses import dataclass, field


@dataclass
class _Pair:
    client: socket.socket
    server: socket.socket
    carried: int = 0
    halted: bool = False  # nothing passes any more, and neither end is closed
    cut_after: int | None = None  # bytes from now on, then the connection ends in the middle of a packet
    delay_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class CuttingProxy:
    """Listens on `port`, and connects each client to 127.0.0.1:`target`. A context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: list[_Pair] = []
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._listen, daemon=True)]

    def __enter__(self) -> CuttingProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends accept, as close does not
        self._listener.close()
        for pair in self._pairs:
            _end(pair)
        for thread in self._threads:
            thread.join(5.0)

    def carries(self) -> bool:
        """Whether the newest connection is alive and has carried something."""
        return bool(self._pairs) and self._pairs[-1].client.fileno() >= 0 and self._pairs[-1].carried > 0

    def trouble(self, kind: str, rng: random.Random) -> None:
        """Disturb the newest connection.

        - delay: bytes take up to 0.3 s longer.
        - cut: both ends are closed.
        - half_open: nothing passes any more, and neither end is closed.
        - truncate: the stream ends in the middle of a packet.
        """
        pair = self._pairs[-1]
        if kind == "delay":
            pair.delay_s = rng.uniform(0.05, 0.3)
        elif kind == "cut":
            _end(pair)
        elif kind == "half_open":
            pair.halted = True
        else:
            pair.cut_after = rng.randrange(1, 300)

    def cut(self) -> None:
        """All connections, at both ends."""
        for pair in self._pairs:
            _end(pair)

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                continue
            pair = _Pair(client, server)
            self._pairs.append(pair)
            thread = threading.Thread(target=self._carry, args=(pair,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, pair: _Pair) -> None:
        other = {pair.client: pair.server, pair.server: pair.client}
        try:
            while not self._closing.is_set():
                ready, _, _ = select.select(list(other), [], [], 0.1)
                for end in ready if not pair.halted else ():
                    if not self._pass_on(pair, end, other[end]):
                        return
                if pair.halted:
                    time.sleep(0.05)
        except (OSError, ValueError):  # one of the ends has been closed
            pass
        finally:
            _end(pair)

    def _pass_on(self, pair: _Pair, source: socket.socket, to: socket.socket) -> bool:
        content = source.recv(4096)
        if not content:
            return False
        if pair.delay_s:
            self._closing.wait(pair.delay_s)
        if pair.cut_after is not None and len(content) >= pair.cut_after:
            to.sendall(content[: pair.cut_after])
            return False
        if pair.cut_after is not None:
            pair.cut_after -= len(content)
        to.sendall(content)
        pair.carried += len(content)
        return True


def _end(pair: _Pair) -> None:
    for end in (pair.client, pair.server):
        with contextlib.suppress(OSError):
            end.close()
