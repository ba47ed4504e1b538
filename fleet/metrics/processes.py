"""The metrics that each process of the control room counts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.common.metrics import counters, gauges

if TYPE_CHECKING:  # a process has imported its own part, and needs no other
    from fleet.collector.collector import Collector as ReportCollector
    from fleet.rollout.controller import Controller
    from fleet.web.boards import LiveBoards

_FINISHED = ("COMPLETED", "ROLLED_BACK", "ABORTED")  # values of RolloutState
_STORED = ("report", "gap", "status", "birth", "result")


class ProcessMetrics(Collector):
    """The metrics that `read` yields, at each scrape."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        return self._read()


def collector_metrics(collector: ReportCollector) -> Iterator[Metric]:
    """Yield the metrics of `tared fleet collect`."""
    taken = {(kind,): collector.counts[kind] for kind in _STORED}
    yield counters("tared_collector_documents", "Documents that were stored.", ["kind"], taken)
    refused = {(code,): count for code, count in collector.refused.copy().items()}
    text = "Documents that were refused, by error."
    yield counters("tared_collector_refused_documents", text, ["code"], refused)
    text = "New devices that were not admitted, each once a batch."
    admission = collector.admission
    yield CounterMetricFamily("tared_collector_refused_devices", text, value=admission.turned_away)
    text = "Whether new devices are refused now, because of --most-devices or --new-devices-per-minute."
    yield GaugeMetricFamily("tared_collector_refuses_devices", text, value=float(bool(admission.state)))
    yield CounterMetricFamily("tared_collector_batches", "Writes to the store.", value=collector.batches)
    text = "Unix time at which a batch was last stored; 0 before the first."
    yield GaugeMetricFamily("tared_collector_last_write_timestamp_seconds", text, value=collector.stored_at)
    text = "Messages that have arrived and are not stored yet."
    messages = {(name,): queue.unconfirmed for name, queue in collector.queues.items()}
    yield gauges("tared_collector_waiting_messages", text, ["connection"], messages)
    text = "Bytes of messages that wait in memory to be read."
    waiting = {(name,): queue.waiting_bytes for name, queue in collector.queues.items()}
    yield gauges("tared_collector_waiting_bytes", text, ["connection"], waiting)
    text = "Whether the broker has admitted the connection."
    connected = {(name,): is_connected for name, is_connected in collector.connected.items()}
    yield gauges("tared_collector_connected", text, ["connection"], connected)


def controller_metrics(controller: Controller) -> Iterator[Metric]:
    """Yield the metrics of `tared fleet rollout run`."""
    text = "Whether the broker has admitted the controller."
    yield GaugeMetricFamily("tared_controller_connected", text, value=float(controller.connected))
    text = "Rollouts that this controller holds."
    yield GaugeMetricFamily("tared_controller_held_rollouts", text, value=len(controller.rollouts))
    states = [each.state.value for each in [*controller.ended]]
    ended = {(state,): states.count(state) for state in _FINISHED}
    yield counters("tared_controller_ended_rollouts", "Rollouts that this controller has ended.", ["state"], ended)


def web_metrics(boards: LiveBoards) -> Iterator[Metric]:
    """Yield the metrics of `tared web`."""
    connected = float(not boards.trouble)
    yield GaugeMetricFamily(
        "tared_web_connected", "Whether the broker has admitted the connection of the pages.", value=connected
    )
    count = len(boards.names())
    yield GaugeMetricFamily("tared_web_boards", "Boards whose live messages the pages have received.", value=count)
