"""`make attack`: all kinds side by side for some minutes, and the table of verdicts; exit code 1 if anything broke."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from pathlib import Path

from attack.campaign import Tally, run, table
from attack.kinds import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each kind goes on from it")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="this kind alone; may be given several times")
    options = parser.parse_args()
    kinds = options.kind or [*KINDS]
    tallies = {kind: Tally() for kind in kinds}
    until_s = time.monotonic() + 60.0 * options.minutes
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        threads = [
            threading.Thread(
                target=run,
                args=(kind, itertools.count(options.seed), until_s, tallies[kind], Path(folder) / str(number)),
            )
            for number, kind in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for kind, tally in tallies.items():
        for words in tally.broken:
            print(f"BROKEN: {kind}, {words}")
    print(table(tallies))
    return 1 if any(tally.broken for tally in tallies.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
