"""The daemon on a disk that fills up, or turns read-only, under everything it writes: it serves on, and says so."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from bench import small_file_system
from brokers import RealBroker, eventually
from daemon_life import LIMIT_S, answer, order
from warm_start import TalkingProcess
from worlds import OUTLASTS_S, World, make_world

from engines.store.artefact import Store

pytestmark = [pytest.mark.slow, pytest.mark.broker]

FULL = "No space left on device|disk is full"
READ_ONLY = "Read-only file system|readonly database"


def frames_served(broker: RealBroker) -> int:
    return int(answer(broker, "status")["frames"])


def current_id(world: World) -> str:
    return Store(world.state_dir).target("current")


def night(folder: Path, broker: RealBroker) -> World:
    mqtt = {"host": broker.host, "port": broker.port}
    return make_world(folder, lambda _: 0.5, OUTLASTS_S, mqtt=mqtt)


def refused_while(world: World, broker: RealBroker, broken: Callable[[], object], reason: str) -> str:
    """The first engine serves; then the disk breaks, a command is refused for that, and the engine serves on."""
    serving = world.wait_for_first_commit()
    broken()
    last = order(broker, "recalibrate", frames="16", method="max")
    assert last.status == "REJECTED"
    assert last.error is not None
    assert last.error.code == "command.log"
    assert re.search(reason, last.error.message), last.error
    served = frames_served(broker)
    eventually(lambda: frames_served(broker) > served, LIMIT_S)
    assert current_id(world) == serving
    return serving


def stopped(process: TalkingProcess) -> str:
    """End a daemon as systemd does: what it had said."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return errors


@pytest.mark.trial
def test_a_store_that_turns_read_only_costs_the_command_and_the_next_start_serves_what_lies_there(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    world = night(tmp_path, any_broker)
    with small_file_system(world.state_dir, "4m") as disk, ExitStack() as read_only:
        with world.running() as process:
            serving = refused_while(
                world, any_broker, lambda: read_only.enter_context(mounted_read_only(disk)), READ_ONLY
            )
            stopped(process)
        world.config["results"] = {"socket": str(disk / "results.socket")}
        summary, errors = world.run("--frames", "20")
        assert (summary["frames"], summary["swaps"]) == (20, [])
        assert re.search(f"code=results.socket .*({READ_ONLY})", errors)
        assert Path(summary["artefact"]).name == serving
        assert re.search(f"warning: .*({READ_ONLY})", errors)
        assert "journal." not in errors  # which can be read
        read_only.close()
        summary, errors = world.run("--frames", "20")
        assert Path(summary["artefact"]).name == serving
        assert "warning" not in errors


@contextmanager
def mounted_read_only(disk: Path) -> Iterator[None]:
    """Make the files read-only for each process that opens one from now on. The daemon's lock stays open."""
    mount(["--bind", str(disk), str(disk)])
    try:
        eventually(lambda: mount(["-o", "remount,bind,ro", str(disk)]), 30.0)  # refused while a file is being written
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def mount(arguments: list[str]) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
