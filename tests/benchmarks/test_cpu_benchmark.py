"""When another tool's engine beats ours on a CPU."""

from __future__ import annotations

import pytest

from agent.cli.benchmark import PLANNED, Entry
from benchmarks.cpu import beats

PEER = "NNCF mixed"


def entry(
    precision: str, p50_ms: float, fidelity: float, metric: float | None = None, backend: str = "openvino"
) -> Entry:
    return Entry(backend, precision, latency_ms={"p50": p50_ms}, fidelity=fidelity, metric=metric)


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        (entry(PEER, 0.9, 0.97), True),
        (entry(PEER, 1.1, 0.97), False),
        (entry(PEER, 0.9, 0.955), False),  # by chance
        (entry(PEER, 0.9, 0.99, 0.300), False),  # the metric counts where there is one
        (entry(PEER, 0.9, 0.90, 0.310), True),
    ],
)
def test_a_peer_has_to_be_faster_and_more_accurate(peer: Entry, found: bool) -> None:
    assert beats(peer, entry(PLANNED, 1.0, 0.95, None if peer.metric is None else 0.302)) == found
