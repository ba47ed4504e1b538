"""Run a module as a process that gives way to the frame path.

`python -m agent.jobs.background NICE PARENT MODULE ARGUMENT...`, PARENT being the process id of the caller.

The process lowers its priorities before the module is imported, so that every thread it ever starts inherits them.
Priorities that are set from outside reach only the threads that exist by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ATTEMPTS, _REFUSED_S = 20, 0.1  # to change the session's niceness; for so long another change refuses it
_FIRST_TO_GO = "1000"  # oom_score_adj(5): where memory runs out, this process goes and never the video


def main() -> None:
    """Use only the CPU and disk time that the frame path leaves, and end with the thread that started this process.

    Refusals of the kernel are ignored: a container may forbid any of these calls, and the work can be done without.
    """
    nice, parent, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # The signal also ends a process that is stopped, which could not notice that its pipe has no reader any more.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
    with contextlib.suppress(OSError):
        nice = max(nice, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.getsid(0) == os.getpid():  # else it would lower the session of a person who started this process by hand
        _lower_session(nice)
    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    sys.argv = sys.argv[3:]
    if os.getppid() == parent:  # else the parent died before PR_SET_PDEATHSIG was set
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _lower_session(nice: int) -> None:
    """Give this process's session a niceness among sessions, where the kernel has autogroups.

    Such a kernel shares the CPU among sessions first: the niceness of a process says nothing against other sessions,
    such as the daemon's. Without privileges it takes one such change in 0.1 s, of all processes together.
    Source: sched(7), "The autogroup feature"; proc_sched_autogroup_set_nice in kernel/sched/autogroup.c.
    """
    with contextlib.suppress(OSError):
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):  # another process was first
                Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")
                return
            time.sleep(random.uniform(1.0, 2.0) * _REFUSED_S)


if __name__ == "__main__":
    main()
