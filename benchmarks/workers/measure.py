"""python measure.py COMMAND...: runs it and prints its CPU seconds, wall seconds and peak resident bytes as JSON.

What the command prints last comes along as `output`. This small process stands between the benchmark and the command
because Linux hands a parent's peak memory on to the child that it starts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import IO


def main() -> None:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.execv(sys.argv[1], sys.argv[1:])
        _, status, usage = os.wait4(child, 0)
        wall_s = time.perf_counter() - began
        print(
            json.dumps(
                {
                    "status": os.waitstatus_to_exitcode(status),
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "wall_s": wall_s,
                    "peak_bytes": usage.ru_maxrss * 1024,
                    "output": _last_line(output),
                    "error": _last_line(errors),
                }
            )
        )


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    main()
