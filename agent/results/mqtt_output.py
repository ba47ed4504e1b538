"""Results on the MQTT topic `detections`: the newest, so many a second, and short enough for every reader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from agent.common.errors import AgentError
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.results.writer import ResultLine

_IDLE_S = 60.0


class ResultsTopic:
    """A sample: what comes between two documents is passed over, and none of it counts as lost.

    publish must not wait. One thread at a time.
    """

    name = "mqtt"
    dropped = None
    trouble: AgentError | None = None  # a broker that is away is told elsewhere

    def __init__(self, publish: Callable[[bytes], object], most_per_s: float) -> None:
        self._publish = publish
        self._period_s = 1.0 / most_per_s
        self._due_s = 0.0
        self._newest: dict[str, ResultLine] = {}  # by camera, whose turn it is next first

    def add(self, line: ResultLine) -> None:
        """It takes the place of the camera's one before."""
        self._newest[line.camera] = line

    def tick(self) -> float:
        """Publish a newest one where that is due, of each camera in turn; in how many seconds to call again."""
        now_s = time.monotonic()
        if self._newest and now_s >= self._due_s:
            self._publish(payload(self._newest.pop(next(iter(self._newest))).document))
            self._due_s = now_s + self._period_s
        return self._due_s - now_s if self._newest else _IDLE_S

    def flush(self) -> None:
        """The rate holds for the last one, too."""

    def close(self) -> None:
        """Nothing is held."""


def payload(document: Mapping[str, Any], most_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """A result as JSON of at most `most_bytes`: the surest detections, and in `left_out` how many others there were.

    Raw outputs that are too long are left out altogether, and counted likewise.
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
