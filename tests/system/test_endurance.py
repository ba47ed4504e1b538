"""Recalibrations of one daemon, one after the other: it is then as it was."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from brokers import RealBroker
from daemon_life import PLAYER, living, order
from kept import kept_in
from worlds import make_world

from agent.commands.log import MOST_ROWS
from agent.contract.commands import CommandResult
from agent.core.state import JobState
from agent.jobs.job import JobJournal
from agent.state.store import StateStore

WARM_UP = 20  # jobs after which all that is kept for good is there
ANSWERED = 12_000  # frames after which the memory of answers, for which labels may come, is full
SAMPLES = 10  # jobs whose median counts, at either end
JOURNALED = 1000  # jobs, with which the journal has its full length
# Artefacts: the newest `store.keep`, the float reference, and the previous one. That may be older than the newest: a
# candidate that is equal to an artefact of the store is this artefact, and serves again.
KEPT = 5
GROWTH = 0.02
OPEN = {
    "lock",
    "outbox.sqlite",
    "outbox.sqlite-shm",
    "outbox.sqlite-wal",
}  # at rest; all else is open while it is written
STATES = [state for state in JobState if not state.is_finished and state not in (JobState.REQUESTED, JobState.PLANNING)]
STATES.append(JobState.COMMITTED)

# Every path that pathlib sees puts its parts into Python's table of names. With what the daemon imports that is one
# megabyte, nine tenths full: some thousand names of artefacts and jobs later it is two, and stays so.
NAMED = """
from agent.daemon import run as daemon
for number in range(100_000):
    sys.intern(f"a name that is soon gone: {number}")

from fleet.cli.main import main
"""

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1800)]


@dataclass
class Footprint:
    """The resources of a daemon; disk_bytes: size of its state directory."""

    rss_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int

    @classmethod
    def of(cls, process: psutil.Process, state_dir: Path) -> Footprint:
        files = [Path(folder, name) for folder, _, names in os.walk(state_dir) for name in names]
        disk_bytes = sum(_size(file) for file in files)
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads(), disk_bytes)


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:  # it has just been replaced
        return 0


def at_rest(process: psutil.Process, state_dir: Path) -> bool:
    """Whether no file of its state is being written."""
    opened = (Path(file.path) for file in process.open_files())
    return all(path.name in OPEN for path in opened if path.is_relative_to(state_dir))


def fill(journal: JobJournal) -> None:
    for number in range(JOURNALED):
        journal.start(
            f"{number:012x}", "command", {"op": "recalibrate", "frames": 8, "method": None}, [f"{number:032x}"]
        )
        for state in STATES:
            journal.enter(f"{number:012x}", state, result={"artefact": 16 * "0", "fidelity": 1.0})


def fill_log(state: StateStore) -> None:
    """With as many commands as are remembered: all carried out, and expired."""
    hour_ago = time.time() - 3600.0
    with state.transaction("write", "commands") as db:
        done = CommandResult(id="c" * 32, status="SUCCEEDED", result={"artefact": 16 * "0", "fidelity": 1.0})
        row = hour_ago, hour_ago - 60.0, done.to_json().decode()
        db.executemany(
            "INSERT INTO commands (id, digest, expires_wall, received_wall, result, final, delivered) "
            "VALUES (?, ?, ?, ?, ?, 1, 1)",
            [(f"{number:032x}", 64 * "d", *row) for number in range(MOST_ROWS)],
        )


@pytest.mark.parametrize("jobs", [pytest.param(20, marks=pytest.mark.trial), pytest.param(200, marks=pytest.mark.soak)])
def test_recalibrations_leave_nothing_behind(jobs: int, tmp_path: Path, any_broker: RealBroker) -> None:
    sleeps, starts = "    def read(self):\n        time.sleep(0.02)", "\nfrom fleet.cli.main import main\n"
    assert sleeps in PLAYER
    assert starts in PLAYER
    paced = PLAYER.replace(sleeps, sleeps.replace("0.02", "float(scene.with_name('pace').read_text())"))
    player = paced.replace(starts, NAMED)
    pace = tmp_path / "pace"
    pace.write_text("0.0005")
    world = make_world(
        tmp_path / "world",
        lambda _: 0.5,
        30.0,
        camera={"source": "rtsp://camera"},
        recalibration={"automatic": False, "max_slowdown": 100.0},  # a busy machine is no matter here
        probation={"max_slowdown": 100.0},
        mqtt={"host": any_broker.host, "port": any_broker.port},
    )
    scene = tmp_path / "scene"
    scene.write_text(str(world.folder / "clip.avi"))
    world.state_dir.mkdir(parents=True)
    state = kept_in(world.state_dir)
    fill(JobJournal(state))
    fill_log(state)
    found: list[Footprint] = []
    with living(world, scene, any_broker, "endurance", player=player, period_s=1.0, alert_period_s=0.02) as life:
        life.wait(lambda: life.said("step=COMMITTED"))
        while life.status()["frames"] < ANSWERED:
            assert life.process.poll() is None, life.log.read_text()
        slower = tmp_path / "slower"
        slower.write_text("0.02")
        slower.replace(pace)  # at once: the camera reads it all the time
        process = psutil.Process(life.process.pid)
        for _ in range(WARM_UP + jobs):
            last = order(any_broker, "recalibrate", frames="8")
            assert last.status == "SUCCEEDED", last
            life.wait(lambda: len(os.listdir(world.state_dir / "artefacts")) <= KEPT)
            life.status()  # by who has tidied up, and given memory back, before
            life.wait(lambda: at_rest(process, world.state_dir))
            found.append(Footprint.of(process, world.state_dir))
    before, after = (
        {key: statistics.median(getattr(each, key) for each in some) for key in vars(found[0])}
        for some in (found[WARM_UP : WARM_UP + SAMPLES], found[-SAMPLES:])
    )
    growth = {key: after[key] / before[key] - 1.0 for key in before}
    print(before, growth)
    assert {key: grown for key, grown in growth.items() if grown > GROWTH} == {}
