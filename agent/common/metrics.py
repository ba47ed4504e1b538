"""Serve the metrics of a process to Prometheus, at http://HOST:PORT/metrics; every long-running process of tared may.

One thread of low priority serves all connections, which are bounded (agent/common/http). A scrape reads what the
process counts anyway, and can end nothing but itself. Floods of scrapes get the same text for a moment.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from agent.common.clock import SYSTEM_CLOCK, Clock, Waker
from agent.common.errors import AgentError, ConfigError, FaultLog, fault_remedy
from agent.common.http.addresses import is_loopback, is_unspecified, split_address
from agent.common.http.connection import HttpConnection
from agent.common.http.reception import Reception, listen
from agent.common.http.request import RefusedRequest, Request, parse_head, response
from agent.common.timing import Backoff, RetryState
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

PATH = "/metrics"
ByLabels = Mapping[Any, float]  # the value of each sample, by the tuple of its labels' values

_NICE = 10  # niceness of the thread: the process's own work goes first
_FRESH_S = 0.25  # how long scrapes get the text that the latest one got
_RETRY_S = (1.0, 60.0)  # between two attempts, at random up to so much
_END_S = 5.0


@dataclass(frozen=True)
class MetricsAddress:
    """The address at which metrics are served.

    names: further names by which a Prometheus server may ask, in its Host header.
    """

    host: str
    port: int
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, names: tuple[str, ...] = ()) -> MetricsAddress:
        """Parse `HOST:PORT`. Raises ConfigError (`metrics.address`)."""
        address = split_address(text)
        if address is None or not address[0]:
            raise ConfigError(
                "metrics.address", f"--metrics {text!a}", "an address such as 127.0.0.1:9756", "correct it"
            )
        return cls(*address, names)

    def admits(self, request: Request, reached: str) -> bool:
        """Return whether the Host of a request is a known one.

        A page in a browser whose own name was made to lead here (DNS rebinding) would read the metrics.

        reached: the address of this machine at which the connection has arrived; it counts as configured where all
        addresses are listened on.
        """
        host = request.host
        if host is None:
            return False
        known = {self.host.lower(), *(name.lower() for name in self.names)}
        return is_loopback(host) or host in known or (is_unspecified(self.host) and host == reached)


class MetricsServer(threading.Thread):
    """A context manager; inside it the metrics are served."""

    def __init__(
        self, address: MetricsAddress, build: Mapping[str, str], *collectors: Collector, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Args:
        address: One that is taken is logged, and tried again.
        build: Labels of `tared_build_info` beside the version, such as the program.
        collectors: Called in this thread for each scrape, at most four times a second.

        Raises OSError without a descriptor to spare.
        """
        super().__init__(name="metrics", daemon=True)
        self._address, self._clock = address, clock
        self._registry = CollectorRegistry()
        info = Info("tared_build", "The version and the program that run.", registry=self._registry)
        info.info({"version": version("tared"), **build})
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        states = (RetryState(_report, Backoff(*_RETRY_S), 1) for _ in range(4))
        self._opening, self._accepting, self._reading, self._serving = states
        self._faults = FaultLog(log)
        self._texts: dict[str, tuple[float, bytes]] = {}  # by content type, when it was made
        self._ending = False
        self._listener: socket.socket | None = None
        self._pause_s = 0.0  # until it is tried again to listen
        self._waker = Waker()

    def __enter__(self) -> MetricsServer:
        self._listen()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._waker.wake()
        self.join(_END_S)
        if not self.is_alive():
            self._waker.close()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._ending:
            if self._listener is not None:
                self._serve(self._listener)
            else:
                self._waker.sleep(self._clock, self._pause_s)
                self._listen()
        if self._listener is not None:
            self._listener.close()

    def _listen(self) -> None:
        """Listen, or log why that fails."""
        try:
            self._listener = listen(self._address.host, self._address.port)
        except OSError as error:
            found = f"{self._address.host} port {self._address.port}: {error.strerror or error}"
            remedy = "choose another port, or end the process that uses it; the next attempt follows by itself"
            failure = AgentError("metrics.port", found, "a free port of this machine", remedy)
            self._pause_s = self._opening.note_failure(failure)
        else:
            self._opening.note_success()

    def _serve(self, listener: socket.socket) -> None:
        """Serve until the end, or until a fault, which must not end the process; then wait a little."""
        try:
            reception = Reception(
                listener, self._waker, HttpConnection, self._answer, self._accepting, "metrics", clock=self._clock
            )
            with closing(reception):
                while not self._ending:
                    reception.turn(None)
                    self._serving.note_success()
        except Exception as error:
            self._faults.note("server", error)
            found = f"{type(error).__name__}: {error}"
            failure = AgentError("metrics.failed", found, "no exception", fault_remedy(error))
            self._waker.sleep(self._clock, self._serving.note_failure(failure))

    def _answer(self, connection: HttpConnection, head: bytes, now_s: float) -> None:
        try:
            request = parse_head(head)
            self._check(request, connection.socket.getsockname()[0])
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
            text = self._text(partial(encode, self._registry), content_type)
            answer = response(HTTPStatus.OK, text, content_type)
            connection.finish(answer if request.method == "GET" else answer[: len(answer) - len(text)], now_s)
        except RefusedRequest as refusal:
            connection.finish(refusal.response, now_s)

    def _check(self, request: Request, reached: str) -> None:
        if not self._address.admits(request, reached):
            text = f"the Host of the request is not known: use {self._address.host}, or configure the name"
            raise RefusedRequest(HTTPStatus.FORBIDDEN, text)
        if request.path != PATH:
            raise RefusedRequest(HTTPStatus.NOT_FOUND, f"expected {PATH}")
        if request.method not in ("GET", "HEAD"):
            raise RefusedRequest(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET or HEAD", "Allow: GET, HEAD")

    def _text(self, encode: partial[bytes], content_type: str) -> bytes:
        """Return the metrics of now, or of a moment ago. Raises RefusedRequest."""
        made_s, text = self._texts.get(content_type, (0.0, b""))
        if text and self._clock.monotonic_s() < made_s + _FRESH_S:
            return text
        try:
            text = encode()
        except Exception as error:  # whatever cannot be read now; the next scrape may succeed
            self._faults.note("scrape", error)
            found = f"{type(error).__name__}: {error}"
            failure = AgentError("metrics.read", found, "values from every collector", fault_remedy(error))
            self._reading.note_failure(failure)
            raise RefusedRequest(HTTPStatus.SERVICE_UNAVAILABLE, str(failure)) from None
        self._reading.note_success()
        self._texts = {content_type: (self._clock.monotonic_s(), text)}
        return text


def counters(name: str, text: str, labels: Sequence[str], counts: ByLabels) -> Metric:
    """Return a family of counters; their samples get the suffix `_total`."""
    return _filled(CounterMetricFamily(name, text, labels=labels), counts)


def gauges(name: str, text: str, labels: Sequence[str], values: ByLabels) -> Metric:
    """Return a family of gauges."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: ByLabels) -> Metric:
    for labels, value in sorted(values.items()):
        family.add_metric(labels, float(value))
    return family


def _report(error: TaredError | None) -> None:
    if error is None:
        log.info("metrics=back")
    else:
        log.warning("metrics=failing error=%r", str(error))
