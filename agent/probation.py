"""What is asked of a candidate while it serves: no slower, and no less faithful, than the engine whose place it takes.

That it answers, in time, with finite outputs of the right shapes, is seen frame by frame in agent/trial.py.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.config import ProbationConfig
from agent.errors import AgentError
from agent.findings import Served
from agent.running_median import RunningMedian
from calibrate.evidence import Interval

_NEWEST = 4000  # inference times kept of each engine
_FEWEST = 32  # of either engine, without which their latencies are not compared
_RECENT = 31  # gaps between frames, whose median is the usual one
_LONGEST_GAP = 5.0  # times the usual one, which is what a longer one counts
_PATIENCE = 10.0  # times the seconds asked, after which fewer frames than asked are enough
_NO_WORSE = 0.01  # of fidelity: no difference
_SIGMAS = 3.0
_LONGEST_DEADLINE_S = 30.0  # half of what the service's watchdog waits for a frame


@dataclass
class _Answers:
    frames: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    # By camera: several may deliver in step, so that their frames come in bursts.
    seconds: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


class Record:
    """The frames each engine has answered: how many, over what time, and how long inference took for the newest.

    live: time is what has passed on the machine's monotonic clock, whatever the clock of the frames is set to; else it
    is capture time. `add` is for the frame path, all else for any thread.
    """

    def __init__(self, live: bool) -> None:
        self._live = live
        self._lock = threading.Lock()
        self._answers: dict[str, _Answers] = {}
        self._gaps_s: dict[str, RunningMedian] = {}  # by camera, between its newest frames

    def begin(self, engine_id: str, beside: str) -> None:
        """From now on count this engine's frames anew; of all others only those of `beside` are of use."""
        with self._lock:
            before = self._answers.get(beside, _Answers())
            self._answers = {beside: before, engine_id: _Answers()}

    def add(self, served: Served) -> None:
        now_s = served.frame.captured_ns / 1e9 if self._live else served.frame.ts
        with self._lock:
            answers = self._answers.setdefault(served.engine_id, _Answers())
            camera, last = served.frame.camera, answers.last.get(served.frame.camera)
            if last is not None:
                gap_s = max(0.0, now_s - last)
                usual_s = self._gaps_s.setdefault(camera, RunningMedian(_RECENT)).add(gap_s)
                answers.seconds[camera] = answers.seconds.get(camera, 0.0) + min(gap_s, _LONGEST_GAP * usual_s)
            answers.last[camera] = now_s
            answers.frames += 1
            if served.together == 1:  # a share of a batch is not what a frame alone takes
                answers.times_s.append(served.inferred_s)

    def frames(self, engine_id: str) -> int:
        with self._lock:
            return self._of(engine_id).frames

    def seconds(self, engine_id: str) -> float:
        """From its first frame to its last, of the camera that it has seen the longest, but for gaps in the video."""
        with self._lock:
            return max(self._of(engine_id).seconds.values(), default=0.0)

    def times_s(self, engine_id: str) -> NDArray[np.float64]:
        """Inference times in s of the newest frames, sorted."""
        with self._lock:
            return np.sort(np.array(self._of(engine_id).times_s, np.float64))

    def slowest_s(self) -> float:
        """The longest inference of those kept, of any engine; 0 where none is."""
        with self._lock:
            return max((time_s for answers in self._answers.values() for time_s in answers.times_s), default=0.0)

    def _of(self, engine_id: str) -> _Answers:
        return self._answers.get(engine_id, _Answers())


def deadline_s(config: ProbationConfig, record: Record) -> float:
    """After which a candidate hangs; record: of the engine before. What that needs at its slowest is no hang."""
    return max(config.deadline_s, min(_LONGEST_DEADLINE_S, config.max_slowdown * record.slowest_s()))


def quantile_bounds(ordered: NDArray[np.float64], share: float) -> tuple[float, float]:
    """The interval of a quantile, three standard errors of its rank either way: 99.7 % for independent values.

    ordered: sorted values (n,). 0 and infinity where the values do not reach as far. Source: order statistics; how
    many of n values lie below a quantile is binomial, whatever their distribution (David and Nagaraja, "Order
    Statistics", 2003, section 7.1).
    """
    n = ordered.size
    margin = _SIGMAS * math.sqrt(n * share * (1.0 - share))
    low, high = math.floor(n * share - margin) - 1, math.ceil(n * share + margin) - 1
    return (float(ordered[low]) if low >= 0 else 0.0), (float(ordered[high]) if high < n else math.inf)


class Probation:
    """One candidate's, from its first frame on.

    It asks at every look, and must not tire of a sound candidate. Latency: a bound of three standard errors on either
    side, for the median and for the 99th percentile; a candidate as fast as the engine before would have to be
    misjudged by the whole of `max_slowdown` beside. A machine that is suddenly busy for most of it may do that. A first
    engine's is told and not judged: where a runtime has no fast kernels for INT8, it is what the owner has asked for.
    Fidelity: beside the engine before, on the same frames; a first engine's beside the reference, which it may lose
    `max_loss` to. The interval is a confidence sequence, so that all looks together condemn a candidate that loses no
    more than it may in 2.5 % of probations at most, for each camera.
    """

    def __init__(
        self,
        config: ProbationConfig,
        record: Record,
        candidate: str,
        before: str,
        max_loss: float,
        *,
        first: bool = False,
    ) -> None:
        """max_loss: of fidelity, that the owner accepts. first: it takes the place of the float reference, and no
        latency of that is a measure for it."""
        record.begin(candidate, before)
        self._config = config
        self._record = record
        self._candidate = candidate
        self._before_s = np.empty(0) if first else record.times_s(before)
        self._may_lose = max_loss if first else _NO_WORSE

    @property
    def frames(self) -> int:
        """Frames that the candidate has answered."""
        return self._record.frames(self._candidate)

    @property
    def seconds(self) -> float:
        return self._record.seconds(self._candidate)

    @property
    def is_over(self) -> bool:
        """Whether it has lasted as long as was asked; to be asked once a first frame has been answered.

        A camera of few frames would take hours for as many: there it lasts for ten times the seconds.
        """
        frames, seconds = max(1, self.frames), self.seconds
        if frames >= self._config.frames:
            return seconds >= self._config.seconds
        return frames >= _FEWEST and self._config.seconds > 0.0 and seconds >= _PATIENCE * self._config.seconds

    @property
    def late(self) -> int:
        """Frames, of the newest, that took longer than nearly all did before, by more than is allowed."""
        if not self._before_s.size:
            return 0
        limit_s = self._config.max_slowdown * float(np.quantile(self._before_s, 0.99))
        return int((self._record.times_s(self._candidate) > limit_s).sum())

    @property
    def judges_p99(self) -> bool:
        """Whether either engine has answered enough frames for their 99th percentiles to be compared."""
        if min(self.frames, self._before_s.size) < _FEWEST:
            return False
        return quantile_bounds(self._before_s, 0.99)[1] < math.inf

    def complaint(self, gains: Sequence[Interval]) -> AgentError | None:
        """What speaks against the candidate; gains: of its fidelity over the engine before, on each camera where that
        is a measure for it."""
        return self._slow() or next(filter(None, map(self._unfaithful, gains)), None)

    def suffered(self, error: AgentError, asked: bool) -> int:
        """Frames that were answered late or wrongly, or would have been, when it was taken back for this reason.

        asked: whether one waited for its answer then.
        """
        return self.frames if error.code == "probation.fidelity" else self.late + asked

    def _slow(self) -> AgentError | None:
        times_s = self._record.times_s(self._candidate)
        if min(times_s.size, self._before_s.size) < _FEWEST:
            return None
        for share in (0.5, 0.99):
            at_least_s = quantile_bounds(times_s, share)[0]
            at_most_s = self._config.max_slowdown * quantile_bounds(self._before_s, share)[1]
            if at_least_s > at_most_s:
                found = f"p{100 * share:g} of inference at least {1e3 * at_least_s:.2f} ms"
                remedy = "look at what else the machine does, or raise probation.max_slowdown"
                return AgentError("probation.latency", found, f"at most {1e3 * at_most_s:.2f} ms", remedy)
        return None

    def _unfaithful(self, gain: Interval) -> AgentError | None:
        if not gain.n or gain.high >= -self._may_lose:
            return None
        found = f"fidelity lower by {-gain.high:.3f} at least than of the engine before, on the same {gain.n} frames"
        remedy = "what served before serves on; a recalibration from other frames may do better"
        return AgentError("probation.fidelity", found, f"at most {self._may_lose:g} lower", remedy)
