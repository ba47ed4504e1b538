"""Ask for a plan with higher precision, because the engine in service loses too much where its scales fit the scene.

The daemon asks, and remembers what was tried in vain; the ladder of the job's child process answers. The daemon imports
this module alone.
"""

from __future__ import annotations

from dataclasses import dataclass

EXHAUSTED = "precision.exhausted"  # the error of a job that found no plan which helps


@dataclass(frozen=True)
class PrecisionRaise:
    """The request for a raise, because the served engine has this fidelity.

    rung: The first plan to try, from 1. Each has at most half of the noise of the one before; lower rungs were tried in
        vain.
    """

    rung: int
    fidelity: float
