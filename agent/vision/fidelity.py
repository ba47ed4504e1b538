"""Compare an engine's answer with the reference engine's for the same frame: its fidelity."""

from __future__ import annotations

from dataclasses import dataclass

from agent.vision.answer import Answer


@dataclass(frozen=True)
class Fidelity:
    """The fidelity of one frame in [0, 1].

    `is_empty`: the frame shows nothing: both engines detected nothing, or their answers cannot be compared. Such frames
    agree by default. An average has to count them apart, or an empty scene would look like proof.
    """

    value: float
    is_empty: bool = False


def fidelity(served: Answer, reference: Answer) -> Fidelity:
    """Return the fidelity of a served answer against the reference engine's for the same frame.

    Raises TypeError on answers of different tasks.
    """
    if type(served) is not type(reference):
        raise TypeError(f"answers of two tasks: {type(served).__name__} and {type(reference).__name__}")
    agreement = served.fidelity(reference)
    if agreement is None:
        return Fidelity(1.0, is_empty=True)
    return Fidelity(agreement, is_empty=served.is_empty and reference.is_empty)
