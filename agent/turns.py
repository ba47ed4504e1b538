"""Whose frame is next: cameras that share one engine take turns, so that none starves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from agent.capture import Frame, FrameSlot


class Turns:
    """The slots of several cameras, from which one thread takes.

    Round robin over those in which a frame lies: the shares are max-min fair. A camera that delivers less than an
    equal share gets all of its frames answered, and the others share what is left alike. Source: Hahne, "Round-robin
    scheduling for max-min fairness in data networks" (IEEE JSAC 1991).
    """

    def __init__(self, keep_every: Sequence[bool]) -> None:
        """keep_every: of each camera, as for FrameSlot."""
        self._changed = threading.Condition(threading.RLock())
        self.slots = tuple(FrameSlot(each, self._changed) for each in keep_every)
        self._next = 0  # whose turn it is
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
            self._awaited = until is None
            self._changed.wait_for(
                lambda: any(slot.full for slot in self.slots) or self.over or (until is not None and until()), timeout_s
            )
            self._awaited = False
            for _ in self.slots:
                slot, self._next = self.slots[self._next], (self._next + 1) % len(self.slots)
                frame = slot.take()
                if frame is not None:
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
