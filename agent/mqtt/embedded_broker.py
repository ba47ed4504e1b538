"""Run an MQTT broker inside this process, for machines that have none: MQTT 3.1.1, loopback only, anonymous."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future
from typing import Any

from agent.common.errors import AgentError
from calibrate.errors import install_extra

_LISTENER = "default"
_START_TIMEOUT_S = 30.0  # amqtt's imports take seconds on a small board
_FLUSH_TIMEOUT_S = 1.0


class EmbeddedBroker:
    """A broker that listens from `__enter__` to `__exit__`, in a thread with an event loop of its own.

    `port` 0 takes a free port; afterwards `port` is the one that listens.

    Raises AgentError:
        broker.missing  the amqtt package is not installed
        broker.port     nothing can listen on the port
    """

    host = "127.0.0.1"

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._listening: Future[int] = Future()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def __enter__(self) -> EmbeddedBroker:
        self._thread.start()
        self.port = self._listening.result(_START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._listening.done():
                raise
            self._listening.set_exception(error)

    async def _serve(self) -> None:
        try:
            from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
            from amqtt.broker import Broker
            from amqtt.contexts import BrokerConfig, ListenerConfig, ListenerType
        except ImportError:
            found = "no amqtt package of version 0.12 or later"
            expected = "the package of the embedded broker, or a broker of your own"
            remedy = f"{install_extra('demo')}, or name your broker as mqtt.host in config.yaml"
            raise AgentError("broker.missing", found, expected, remedy) from None
        logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # it reports every lost client as an error
        logging.getLogger("transitions").setLevel(logging.WARNING)
        # We listen ourselves, because amqtt does not say which port it got when it has to choose a free one.
        listeners = {_LISTENER: ListenerConfig(type=ListenerType.EXTERNAL)}
        plugins: dict[str, Any] = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {}}
        broker = Broker(BrokerConfig(listeners=listeners, plugins=plugins))
        connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:  # it ends the connection of a client that speaks MQTT 5, which may be gone already
                with contextlib.suppress(OSError):
                    await broker.external_connected(StreamReaderAdapter(reader), StreamWriterAdapter(writer), _LISTENER)
            finally:
                writer.close()
                with contextlib.suppress(OSError):  # a client that is gone already
                    await writer.wait_closed()

        def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(connection(reader, writer))
            connections[task] = writer
            task.add_done_callback(connections.pop)

        await broker.start()
        try:
            server = await asyncio.start_server(admit, self.host, self.port)
        except OSError as error:
            raise AgentError("broker.port", str(error), "a free port", "choose another port") from None
        self._loop = asyncio.get_running_loop()
        self._listening.set_result(server.sockets[0].getsockname()[1])
        await self._closing.wait()
        server.close()
        # amqtt's own shutdown waits for its clients, which do not know of it: disconnect them first.
        for writer in connections.values():
            writer.close()
        if connections:
            await asyncio.wait(connections, timeout=_FLUSH_TIMEOUT_S)
        for writer in connections.values():  # clients that do not read
            writer.transport.abort()
        while connections:
            await asyncio.wait(connections)
        await broker.shutdown()
