"""The server of metrics: whom it answers, with what, and what it withstands."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from brokers import eventually, free_port
from prometheus_client.core import GaugeMetricFamily
from prometheus_values import scrape, value
from promtool import Fixed, metrics_server, promtool
from turned_clock import TurnedClock

from agent.common.errors import ConfigError
from agent.common.metrics import MetricsAddress, MetricsServer

ONE = Fixed(GaugeMetricFamily("tared_things", "Things.", value=1.0))
STRANGERS = 200  # tests/system/test_exhausted.py has a thousand


def ask(
    server: MetricsServer, method: str = "GET", path: str = "/metrics", at: str = "127.0.0.1", **headers: str
) -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection(at, server._address.port, timeout=10.0)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_metrics_are_answered_and_nothing_else_is() -> None:
    with metrics_server(ONE) as server:
        status, text = ask(server)
        assert (status, ask(server, "HEAD")) == (200, (200, ""))
        assert "tared_things 1.0" in text
        assert 'tared_build_info{program="test",version="' in text
        assert ask(server, path="/")[0] == 404
        assert ask(server, "POST")[0] == 405
        with socket.create_connection(("127.0.0.1", server._address.port)) as stranger:
            stranger.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
            assert stranger.recv(99).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("listens", "host", "status"),
    [
        ("127.0.0.1", "camera-7.plant", 200),
        ("127.0.0.1", "CAMERA-7.plant:9755", 200),
        ("127.0.0.1", "evil.example", 403),
        ("0.0.0.0", "127.0.0.1", 200),
        ("0.0.0.0", "192.168.1.5", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "[::1", 403),
    ],
)
def test_only_known_hosts_are_answered(listens: str, host: str, status: int) -> None:
    with metrics_server(ONE, listens, ("camera-7.plant",)) as server:
        assert ask(server, Host=host)[0] == status


def test_the_address_at_which_one_arrived_is_known_where_all_are_listened_on() -> None:
    with metrics_server(ONE, "0.0.0.0") as server:
        assert ask(server, at="127.0.0.2")[0] == 200


def test_a_collector_that_fails_is_a_refusal_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    collector = Fixed(*ONE.metrics)
    caplog.set_level(logging.INFO)
    with metrics_server(collector) as server:
        collector.error = OSError(24, "Too many open files")
        answers = [ask(server) for _ in range(3)]
        collector.error = None
        assert ask(server)[0] == 200
    assert {status for status, _ in answers} == {503}
    assert "Too many open files" in answers[0][1]
    assert caplog.text.count("metrics=failing") == caplog.text.count("metrics=back") == 1


def test_a_fault_of_the_server_ends_neither_it_nor_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = TurnedClock()
    with metrics_server(ONE, clock=clock) as server:
        with monkeypatch.context() as faulty:
            faulty.setattr(server, "_check", lambda *_: 1 / 0)
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(server)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server)
            clock.turn_until(answer.done)
        assert answer.result()[0] == 200
    assert "ZeroDivisionError" in caplog.text


def test_scrapes_get_the_same_text_for_a_moment() -> None:
    clock, collector = TurnedClock(), Fixed(*ONE.metrics)
    with metrics_server(collector, clock=clock) as server:
        assert ask(server)[0] == 200
        collector.error = OSError(24, "Too many open files")
        clock.turn(0.2)
        assert ask(server)[0] == 200
        clock.turn(0.1)
        assert ask(server)[0] == 503


def test_strangers_keep_no_scrape_out_and_take_no_thread() -> None:
    threads = threading.active_count()
    with metrics_server(ONE) as server, ExitStack() as stack:
        port = server._address.port
        for number in range(STRANGERS):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10.0))
            if number % 2:
                stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127")
        assert threading.active_count() == threads + 1
        assert value(port, "tared_things") == 1.0
        taken = value(port, "process_open_fds")  # the strangers' own ends are of this process, too
        assert taken is not None
        assert taken < STRANGERS + 150


def test_prometheus_gets_the_format_that_it_prefers() -> None:
    with metrics_server(ONE) as server:
        _, text = ask(server, Accept="application/openmetrics-text;version=1.0.0,*/*;q=0.1")
        assert text.endswith("# EOF\n")
        promtool("check", "metrics", content=scrape(server._address.port))


def test_a_port_that_is_taken_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = TurnedClock()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = MetricsServer(MetricsAddress("127.0.0.1", port), {}, ONE, clock=clock)
        with caplog.at_level(logging.INFO), server:
            eventually(lambda: "metrics.port" in caplog.text)
            assert "choose another" in caplog.text
            taken.close()
            clock.turn_until(lambda: "metrics=back" in caplog.text)
            assert value(port, "tared_things") == 1.0
    assert caplog.text.count("metrics.port") == 1


@pytest.mark.parametrize("text", ["9755", ":9755", "127.0.0.1:", "127.0.0.1:99999", "localhost:http"])
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.address.*such as 127\.0\.0\.1:9756"):
        MetricsAddress.parse(text)
    assert MetricsAddress.parse("[::1]:9755") == MetricsAddress("::1", 9755)


def test_the_server_ends_while_strangers_hold_on() -> None:
    port = free_port()
    server = MetricsServer(MetricsAddress("127.0.0.1", port), {}, ONE)
    with server, socket.create_connection(("127.0.0.1", port), 10.0) as stranger:
        eventually(lambda: value(port, "tared_things") == 1.0)
        stranger.sendall(b"GET ")
    assert not server.is_alive()
