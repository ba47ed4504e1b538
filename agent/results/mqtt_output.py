"""Publish results on the MQTT topic `detections`: only the newest, at a limited rate, short enough for every reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.results.writer import Output, ResultLine

_WEIGHTS = ("score", "share")  # what says how much of an answer a part of it is
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
    """Return a result as JSON of at most `most_bytes`: the surest parts, and in `left_out` how many are missing.

    Parts are detections, by their score, or segments, by their share of the frame. Whatever else is too long, such as
    raw outputs, is left out altogether, and counted in the same way.
    """
    whole = json.dumps(document).encode()
    key = next((key for key, value in document.items() if isinstance(value, (list, Mapping))), None)
    if len(whole) <= most_bytes or key is None:
        return whole
    parts = document[key]
    bare = {**document, key: type(parts)(), "left_out": len(parts)}
    if not all(isinstance(each, Mapping) and (each.keys() & {*_WEIGHTS}) for each in parts):
        return json.dumps(bare).encode()
    surest = sorted(parts, key=lambda each: -float(next(each[name] for name in _WEIGHTS if name in each)))
    lengths = accumulate((len(json.dumps(each)) + len(", ") for each in surest), initial=len(json.dumps(bare)))
    kept = max(0, sum(length <= most_bytes for length in lengths) - 1)
    return json.dumps({**bare, key: surest[:kept], "left_out": len(parts) - kept}).encode()
