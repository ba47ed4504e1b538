"""What a collector says that it has, and what follows from hearing the same twice."""

from __future__ import annotations

from enum import Enum

_LACKING_S = 10.0  # over which a collector says the same, though it was sent again what there is
_MOST_EPOCHS = 1000  # of which is remembered what was said


class Heard(Enum):
    """NEWS: it has more than before. HOLE: it has heard of more, but not of what comes next. LACKING: so it goes on."""

    NEWS = "news"
    HOLE = "hole"
    LACKING = "lacking"


class Acknowledgements:
    """By epoch; a number that comes late, or from a collector that is behind, takes nothing back."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._repeated: dict[int, tuple[int, float]] = {}  # the number that is repeated, and since when

    def hear(self, epoch: int, upto: int, now_s: float) -> Heard:
        """now_s: monotonic."""
        if len(self._most) >= _MOST_EPOCHS:
            self._most.clear()
            self._repeated.clear()
        if upto > self._most.get(epoch, -1):
            self._most[epoch] = upto
            self._repeated.pop(epoch, None)
            return Heard.NEWS
        repeated, since_s = self._repeated.get(epoch, (-1, now_s))
        if repeated != upto:
            self._repeated[epoch] = upto, now_s
        elif now_s - since_s >= _LACKING_S:
            return Heard.LACKING
        return Heard.HOLE
