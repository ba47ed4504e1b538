"""One case of an attack, and the judgement on it."""

from __future__ import annotations

import resource
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from calibrate.errors import TaredError

Verdict = Literal["refused cleanly", "survived", "BROKEN"]
Outcome = Literal["refused cleanly", "survived"] | None  # None: survived
T = TypeVar("T")

MOST_S = 20.0  # of the process, for one case; who waits for it has more patience, with other work beside it
MOST_KIB = 400 << 10  # by which one case may raise the peak of the process


class Case(NamedTuple):
    """An input of one kind.

    name: of the fault in it.
    attempt: puts the input before the product, and asserts what has to hold then. Raises TaredError, or returns
        'refused cleanly', where the product refuses it.
    """

    name: str
    attempt: Callable[[], Outcome]


class Judgement(NamedTuple):
    """why: of a broken case, the last words of what it raised, or the bound that it passed."""

    verdict: Verdict
    why: str = ""


Kind = Callable[[Random, Path], Iterator[Case]]  # the cases of one seed, in a folder of their own


def judge(case: Case) -> Judgement:
    """Run a case, and judge it. A worker that does not come back from it is judged by the one who waits."""
    began_s, peak_kib = time.process_time(), _peak_kib()
    try:
        verdict: Verdict = case.attempt() or "survived"
        why = ""
    except TaredError as error:
        complete = all((error.code, error.found, error.expected, error.remedy)) and "." in error.code
        verdict, why = ("refused cleanly", "") if complete else ("BROKEN", f"an incomplete error {error!r}")
    except Exception as error:
        where = " < ".join(
            f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)[:-4:-1]
        )
        verdict, why = "BROKEN", f"{type(error).__name__}: {str(error)[:200]} ({where})"
    took_s, grown_kib = time.process_time() - began_s, _peak_kib() - peak_kib
    if took_s > MOST_S:
        verdict, why = "BROKEN", f"{took_s:.0f} s"
    elif grown_kib > MOST_KIB:
        verdict, why = "BROKEN", f"{grown_kib >> 10} MiB more memory"
    return Judgement(verdict, why)


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def drawn(strategy: SearchStrategy[T], rng: Random, count: int) -> list[T]:
    """Return examples of a strategy of Hypothesis's, which other tests use as such; equal for equal `rng`."""
    found: list[T] = []

    @seed(rng.getrandbits(64))
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found


def damaged(rng: Random, content: bytes) -> tuple[str, bytes]:
    """Return the name of a fault that any file may have, and the content with it."""
    if not content:
        return "noise", rng.randbytes(100)
    at = rng.randrange(len(content))
    match rng.randrange(7):
        case 0:
            return "truncated", content[:at]
        case 1:
            changed = bytearray(content)
            for _ in range(rng.choice((1, 2, 8, 64))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return "flipped", bytes(changed)
        case 2:
            begin = rng.randrange(len(content))
            return "spliced", content[:at] + content[begin : begin + rng.randrange(200)] + content[
                at + rng.randrange(40) :
            ]
        case 3:
            return "doubled", content * 2
        case 4:
            return "with an end", content + rng.randbytes(rng.choice((1, 1000)))
        case 5:
            return "empty", b""
        case _:
            return "noise", rng.randbytes(rng.choice((1, 100, 5000)))
