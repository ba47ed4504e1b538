"""Whose frame is next: cameras that share one engine take turns, so that none starves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from agent.capture import Frame, FrameSlot


class Turns:
    """The slots of several cameras, from which one thread takes.

    Round robin over those in which a frame lies: the shares are max-min fair. A camera that delivers less than an
    equal share gets all of its frames answered, and the others share what is left alike. Source: Hahne, "Round-robin
    scheduling for max-min fairness in data networks" (IEEE JSAC 1991).
    """

    def __init__(self, keep_every: Sequence[bool]) -> None:
        """keep_every: of each camera, as for FrameSlot."""
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self.slots = tuple(FrameSlot(each, lock, self._changed) for each in keep_every)
        self._next = self._picked = 0  # whose turn it is, and whose it was
        self._awaited = False

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a frame, with nothing else to do."""
        return self._awaited

    @property
    def over(self) -> bool:
        """Whether no more frames come."""
        return all(slot.over for slot in self.slots)

    @property
    def age(self) -> bool:
        """Whether a frame that waits may be overwritten by a newer one."""
        return not all(slot.keep_every for slot in self.slots)

    def get(self, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> Frame | None:
        """Wait for a frame; None where none comes in time, nor before `until`, which is asked anew at each `nudge`, or
        where none comes any more."""
        with self._changed:
            if (frame := self._pick(range(len(self.slots)))) is not None:
                return frame
            self._awaited = until is None
            self._changed.wait_for(
                lambda: any(slot.full for slot in self.slots) or self.over or (until is not None and until()), timeout_s
            )
            self._awaited = False
            return self._pick(range(len(self.slots)))

    def beside(self, most: int, wait_s: float, until: Callable[[], bool] = lambda: False) -> list[Frame]:
        """After `get`: the next frames of other cameras, one of each and `most` at most, that are there in `wait_s`.

        `until` ends the wait, as for `get`. Nobody waits for a camera that has delivered nothing for two seconds.
        """
        if not most:
            return []
        others, found = set(range(len(self.slots))) - {self._picked}, list[Frame]()
        give_up_at = time.monotonic() + wait_s
        with self._changed:
            while len(found) < most:
                frame = self._pick(others)
                patience_s = give_up_at - time.monotonic()
                if frame is not None:
                    others.discard(self._picked)
                    found.append(frame)
                elif patience_s <= 0.0 or until() or not any(self.slots[other].delivers for other in others):
                    break
                else:
                    self._changed.wait(patience_s)
        return found

    def _pick(self, among: Collection[int]) -> Frame | None:
        """The frame of the camera whose turn it is, of those with these numbers that have one."""
        for turn in range(len(self.slots)):
            number = (self._next + turn) % len(self.slots)
            if number in among and (frame := self.slots[number].take()) is not None:
                self._picked, self._next = number, (number + 1) % len(self.slots)
                return frame
        return None

    def nudge(self) -> None:
        """Whoever waits is to look again; any thread may say so."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """No more frames: what waits in `put` goes on, and what lies in the slots can still be taken."""
        for slot in self.slots:
            slot.close()
