"""Values read from /metrics."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        return str(answer.read().decode())


def value(port: int, name: str, **labels: str) -> float | None:
    """Of the sample that has these labels."""
    for family in text_string_to_metric_families(scrape(port)):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None
