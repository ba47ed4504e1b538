"""The daemon on a disk that turns read-only under everything it writes: it serves on, and says so."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from bench import small_file_system
from brokers import RealBroker, eventually
from daemon_life import LIMIT_S, answer, order
from worlds import OUTLASTS_S, make_world

from engines.store.artefact import Store

READ_ONLY = "Read-only file system|readonly database"


@pytest.mark.trial
@pytest.mark.broker
def test_a_store_that_turns_read_only_costs_the_command_and_the_next_start_serves_what_lies_there(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    mqtt = {"host": any_broker.host, "port": any_broker.port}
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, mqtt=mqtt)
    with small_file_system(world.state_dir, "4m") as disk, ExitStack() as read_only:
        with world.running() as process:
            serving = world.wait_for_first_commit()
            read_only.enter_context(mounted_read_only(disk))
            last = order(any_broker, "recalibrate", frames="16", method="max")
            assert last.error is not None
            assert (last.status, last.error.code) == ("REJECTED", "state.write")
            assert re.search(READ_ONLY, last.error.message), last.error
            served = answer(any_broker, "status")["frames"]
            eventually(lambda: answer(any_broker, "status")["frames"] > served, LIMIT_S)
            assert Store(world.state_dir).target("current") == serving
            process.terminate()
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
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
