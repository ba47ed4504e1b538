"""What is gathered for the next calibration, of all cameras that share a model: they share its calibration, too."""

from __future__ import annotations

import threading
from collections.abc import Callable

from agent.capture import Frame
from agent.chosen_frames import ChosenFrames
from agent.config import Config
from agent.decode import Prediction
from agent.model_spec import ModelSpec
from agent.selection_report import SelectionReport
from calibrate.histogram import AbsHistogram
from engines.backend import Array, Observation


class Gathering:
    """One collection at a time; any thread may use it."""

    def __init__(
        self, spec: ModelSpec, config: Config, clock: Callable[[Frame], float] = lambda frame: frame.ts
    ) -> None:
        """clock: the capture time of a frame, as all cameras have it."""
        self._spec = spec
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._chosen = ChosenFrames(config, hurried=False)
        self._alerted: set[str] = set()
        self._in_use = False

    def set_in_use(self, in_use: bool) -> None:
        """Whether a job waits for the collection, which a warning then does not drop."""
        with self._lock:
            self._in_use = in_use

    def collect_afresh(self, hurried: bool = False) -> None:
        """Drop the collection and start a new one. hurried: somebody waits for it, and no frame is passed over for a
        better one."""
        with self._lock:
            self._chosen = ChosenFrames(self._config, hurried)

    def calm(self, camera: str) -> None:
        """This camera's scene is what the calibration was made for."""
        with self._lock:
            self._alerted.discard(camera)

    def alert(self, camera: str) -> None:
        """This camera's scene has left the calibration: what was gathered before is not what the cure is for."""
        with self._lock:
            if camera not in self._alerted and not self._in_use:
                self._chosen = ChosenFrames(self._config, hurried=False)
            self._alerted.add(camera)

    def add(self, frame: Frame, tensor: Array, seen: Observation, reference: Prediction) -> None:
        """Take an observed frame, its network input and what the reference says of it, if it is chosen.

        From a warning on frames are wanted at once, so that by the alarm most of the cure has been gathered.
        """
        with self._lock:
            self._chosen.add(frame, self._clock(frame), tensor, seen, reference, hurried=bool(self._alerted))

    @property
    def counts(self) -> tuple[int, int]:
        """Chosen frames in the histograms; telling ones that are held out beside them."""
        with self._lock:
            return self._chosen.collection.frames, self._chosen.collection.telling

    @property
    def nbytes(self) -> int:
        """What it takes, beside the held-out frames."""
        with self._lock:
            return self._chosen.nbytes

    def selection(self) -> SelectionReport:
        """How the frames of the collection were chosen."""
        with self._lock:
            return self._chosen.report(self._spec.label)

    def collected(self) -> tuple[int, dict[str, AbsHistogram], list[Array]]:
        """A copy of the collection: frames in the histograms, histograms by tap, held-out network inputs."""
        with self._lock:
            collection = self._chosen.collection
            return collection.frames, dict(collection.histograms), list(collection.held_out)
