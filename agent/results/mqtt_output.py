"""Publish results on the MQTT topic `detections`: only the newest, at a limited rate, short enough for every reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.results.writer import Output, ResultLine

_IDLE_S = 60.0


class ResultsTopic(Output):
    """Publish a sample: lines between two documents are skipped, and do not count as lost.

    `publish` must not wait. One thread at a time.
    """

    name = "mqtt"  # without trouble: a broker that is away is reported elsewhere

    def __init__(self, publish: Callable[[bytes], object], most_per_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._publish, self._clock = publish, clock
        self._period_s = 1.0 / most_per_s
        self._due_s = 0.0
        self._newest: dict[str, ResultLine] = {}  # by camera, in the order of their turns

    def add(self, line: ResultLine) -> None:
        """Keep the line in place of the camera's previous one."""
        self._newest[line.camera] = line

    def tick(self) -> float:
        """Publish the newest line of the next camera where one is due. Return the seconds until the next call."""
        now_s = self._clock.monotonic_s()
        if self._newest and now_s >= self._due_s:
            self._publish(result_payload(self._newest.pop(next(iter(self._newest))).document))
            self._due_s = now_s + self._period_s
        return self._due_s - now_s if self._newest else _IDLE_S


def result_payload(document: Mapping[str, Any], most_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """Return a result as JSON of at most `most_bytes`: the surest detections, and in `left_out` how many are missing.

    Raw outputs that are too long are left out altogether, and counted in the same way.
    """
    whole = json.dumps(document).encode()
    if len(whole) <= most_bytes:
        return whole
    kind = "detections" if "detections" in document else "outputs"
    count = len(document[kind])
    bare = {**document, kind: type(document[kind])(), "left_out": count}
    if kind == "outputs":
        return json.dumps(bare).encode()
    surest = sorted(document[kind], key=lambda each: -float(each["score"]))
    lengths = accumulate((len(json.dumps(each)) + len(", ") for each in surest), initial=len(json.dumps(bare)))
    kept = sum(length <= most_bytes for length in lengths) - 1
    return json.dumps({**bare, kind: surest[: max(0, kept)], "left_out": count - max(0, kept)}).encode()
