"""Run `tared web` beside the daemon (`tared run --web`): a process of its own, which ends with the daemon.

The video does not depend on it: where no page can be served, one line says why.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.common.console import say
from agent.jobs.child_process import start_background
from agent.mqtt.endpoint import Endpoint

_NICE = 5  # the video goes first
_END_S = 5.0
_SERVES = "boards: "  # what `tared web` says once it serves, before the address


@contextmanager
def serving_pages(listen: str, config: Path, endpoint: Endpoint) -> Iterator[None]:
    """Let `tared web` serve while the block runs, and say where.

    listen: HOST:PORT, for browsers. config: the file whose mqtt section leads to the broker, but for its address, which
    is the endpoint's.
    """
    web = ["web", "-c", str(config.absolute()), "--listen", listen]
    web += ["--host", endpoint.host, "--port", str(endpoint.port)]
    try:
        process = start_background(_NICE, "fleet.cli", *web, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        say(f"no page for a browser: {error.strerror}")
        yield
        return
    ending = threading.Event()
    assert process.stderr is not None
    follower = threading.Thread(target=_follow, args=(process.stderr, ending), name="pages", daemon=True)
    try:
        follower.start()
        yield
    finally:
        ending.set()
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if follower.is_alive():
            follower.join()
        process.stderr.close()


def _follow(lines: Iterable[str], ending: threading.Event) -> None:
    """Say where the pages are, or why there are none."""
    for line in lines:
        if ending.is_set():
            continue  # what it says about its end is no news
        if line.startswith(_SERVES):
            say(f"watch it in a browser: {line.removeprefix(_SERVES).strip()}")
        elif line.startswith("error: "):
            say(f"no page for a browser: {line.removeprefix('error: ').strip()}")
