"""Prometheus's own program that judges metrics and rules; and metrics served in the test's process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from brokers import free_port
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.metrics import MetricsAddress, MetricsServer


class Fixed(Collector):
    """Always the same metrics, or a failure if the test wants one."""

    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics
        self.error: Exception | None = None

    def collect(self) -> Iterable[Metric]:
        if self.error is not None:
            raise self.error
        return self.metrics


def promtool(*arguments: str | Path, content: str = "") -> None:
    """Run it; fail with its words. Skips where it is missing; TARED_REQUIRE_PROMTOOL=1 turns that into a failure."""
    if shutil.which("promtool") is None:
        missing = "promtool is not installed: apt-get install prometheus"
        if os.environ.get("TARED_REQUIRE_PROMTOOL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    done = subprocess.run(["promtool", *arguments], input=content, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr


def metrics_server(
    collector: Collector, host: str = "127.0.0.1", names: tuple[str, ...] = (), clock: Clock = SYSTEM_CLOCK
) -> MetricsServer:
    """One on a free port, to be entered."""
    return MetricsServer(MetricsAddress(host, free_port(), names), {"program": "test"}, collector, clock=clock)
