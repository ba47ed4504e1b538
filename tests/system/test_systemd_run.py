"""The daemon under systemd itself, in the whole sandbox of its unit: it serves, calibrates, hangs, and serves again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from brokers import RealBroker, Watcher
from places import ROOT
from service_driver import DRIVER
from systemd_machine import Machine, process_status, sandbox_of_this_interpreter, why_not
from systemd_unit import DROP_IN, UNIT
from worlds import FIRST_COMMIT, make_world

from agent.contract.topics import Topics

START_S, WATCHDOG_S, ABORT_S, RESTART_S = 60.0, 8.0, 2.0, 0.5
KEY = "of the artefacts, 32 bytes long.."

_NICE = 12  # of the process that builds candidates

# In the sandbox, before the daemon: what that asks of the system, and what it must not get.
PROBE = """
import ctypes, errno, inspect, os, resource, socket
from pathlib import Path

import psutil

from engines.store.signing import find_key

libc = ctypes.CDLL(None, use_errno=True)
assert libc.adjtimex(ctypes.create_string_buffer(208)) >= 0  # whether the clock is synchronised
assert socket.getaddrinfo("localhost", 1883)
assert psutil.virtual_memory().available > 0 and psutil.cpu_times().user > 0
assert list(Path("/sys/class").iterdir()) and Path("/proc/sys/kernel/random/boot_id").read_text()
assert find_key() == {key!r}
assert Path(os.environ["CREDENTIALS_DIRECTORY"], "tared-mqtt-password").read_text() == "none"
for folder in (os.environ["STATE_DIRECTORY"], os.environ["PYCUDA_CACHE_DIR"], "/tmp", "/dev/shm"):
    Path(folder, "probe").write_text("")
    Path(folder, "probe").unlink()


place = name = number = family = None  # of the attempt, where there are many


def refused(code, attempt):
    try:
        attempt()
    except OSError as error:
        assert error.errno in code, (error, place, name, number, family)
    else:
        raise AssertionError(inspect.getsource(attempt), place, name, number, family)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


refused((errno.EROFS, errno.EACCES), lambda: Path("/etc/tared-probe").write_text(""))
refused((errno.EPERM,), lambda: os.mknod("/tmp/device", 0o20600, os.makedev(1, 1)))
refused((errno.EPERM,), lambda: call("unshare", 0x10000000))
refused((errno.EPERM,), lambda: os.setuid(0))
refused((errno.EPERM,), lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
refused((errno.EAFNOSUPPORT,), lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
refused((errno.EPERM, errno.EACCES), lambda: open("/dev/kmsg"))

# What somebody would try who has taken the process over: a picture that a decoder mistook, say. Homes are empty here,
# and a tmpfs where the tests' interpreter lies in one; as the unit ships nobody enters them.
NOT_MINE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
for place in ("/", "/etc", "/usr/bin", "/var/lib", "/var/log", "/boot", "/run/world", "/run/systemd",
              "/proc/sys/kernel", "/sys/class", "/sys/fs/cgroup", "/opt", "/dev"):
    refused(NOT_MINE, lambda: Path(place, "tared-probe").write_text(""))
for name in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state", "/proc/1/oom_score_adj"):
    refused(NOT_MINE, lambda: os.close(os.open(name, os.O_WRONLY)))
for name in ("/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/proc/kcore", "/dev/mem", "~root/.ssh", "~root/.bashrc"):
    refused(NOT_MINE, lambda: os.close(os.open(os.path.expanduser(name), os.O_RDONLY)))
others = [each for each in os.listdir("/proc") if each.isdigit() and os.stat(f"/proc/{each}").st_uid != os.getuid()]
assert not others, others
families = [getattr(socket, f"AF_{name}") for name in ("PACKET", "ALG", "VSOCK", "CAN", "TIPC")]
for family in families:
    refused((errno.EAFNOSUPPORT,), lambda: socket.socket(family, socket.SOCK_RAW))
refused((errno.EPERM, errno.EACCES), lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
suid = Path(os.environ["STATE_DIRECTORY"], "suid")
suid.write_text("")
refused((errno.EPERM,), lambda: suid.chmod(0o4755))
refused((errno.EPERM,), lambda: suid.chmod(0o2755))
refused((errno.EPERM,), lambda: os.close(os.open(suid.with_name("suid-2"), os.O_CREAT | os.O_WRONLY, 0o4755)))
suid.unlink()
refused((errno.EPERM, errno.ESRCH), lambda: call("ptrace", 16, 1, None, None))  # PTRACE_ATTACH
refused((errno.EPERM, errno.ESRCH), lambda: os.kill(1, 9))
refused((errno.EPERM,), lambda: os.chroot("/tmp"))
refused((errno.EPERM,), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
refused((errno.EPERM,), lambda: os.setgroups([0]))
refused((errno.EPERM,), lambda: call("personality", 0x0008))  # PER_LINUX32
refused((errno.EPERM,), lambda: call("sethostname", b"taken", 5))
refused((errno.EPERM,), lambda: call("reboot", 0))
refused((errno.EPERM,), lambda: call("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0))
# bpf, init_module, finit_module, kexec_load, perf_event_open, pivot_root, swapon and swapoff, acct.
if os.uname().machine == "x86_64":
    for number in (321, 175, 313, 246, 298, 155, 167, 168, 163):
        refused((errno.EPERM,), lambda: call("syscall", number, 0, 0, 0, 0, 0))
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
status = Path("/proc/self/status").read_text()
assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
assert all(f"{name}:\t{0:016x}" in status for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
"""

# What the test changes of the unit: where the program and its world are, and times that a test can wait for. And a look
# with root's rights, for which only the device policy counts, at what that leaves.
FOR_TEST = """[Service]
ExecStart=
ExecStartPre=+/bin/sh -c "exec 2> /dev/null; ! head -c 1 < /dev/kmsg && head -c 1 < /dev/urandom"
ExecStartPre={python} /run/world/probe.py
ExecStart={python} /run/world/driver.py /run/switches /run/world/clip.avi run -c /run/world/config.yaml
BindReadOnlyPaths={world}:/run/world
BindPaths={switches}:/run/switches
{sandbox}BindReadOnlyPaths={root}:/run/source
Environment=PYTHONPATH=/run/source PYTHONDONTWRITEBYTECODE=1
SupplementaryGroups=
SupplementaryGroups=video
LoadCredential=tared-artefact-key:{world}/key
StandardError=append:{log}
TimeoutStartSec={start_s}
WatchdogSec={watchdog_s}
TimeoutAbortSec={abort_s}
RestartSec={restart_s}
"""


@dataclass
class Service:
    """tared.service on a machine of its own. `log` is what the daemon says."""

    machine: Machine
    log: Path
    switches: Path

    def said(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text()) if self.log.exists() else []

    def wait(self, holds: object, limit_s: float = 240.0) -> None:
        assert callable(holds)
        self.machine.eventually(holds, limit_s, self.log)

    def start(self) -> None:
        started = self.machine.systemctl("start", "tared.service")
        assert started.returncode == 0, started.stderr + self.log.read_text()

    def stop(self) -> None:
        assert self.machine.systemctl("stop", "tared.service").returncode == 0
        assert self.machine.property("tared.service", "Result") == "success"

    def wait_running(self) -> None:
        self.wait(lambda: self.machine.property("tared.service", "SubState") == "running")

    @property
    def restarts(self) -> int:
        return int(self.machine.property("tared.service", "NRestarts"))


@pytest.fixture
def service(request: pytest.FixtureRequest, tmp_path: Path, any_broker: RealBroker) -> Iterator[Service]:
    if reason := why_not():
        pytest.skip(f"systemd cannot run here: {reason}")
    Path("/dev/kmsg").open("rb").close()  # what the policy denies can be had without it
    folders = {name: tmp_path / name for name in ("units", "switches", "world")}
    for folder in folders.values():
        folder.mkdir(mode=0o755)
    folders["switches"].chmod(0o777)
    world = make_world(
        folders["world"], lambda _: 0.3, 20.0, camera={"source": "rtsp://camera"}, recalibration={"nice": _NICE}
    )
    del world.config["state_dir"]
    world.config["mqtt"] = {"host": "localhost", "port": any_broker.port, "device": "board"}
    (world.folder / "config.yaml").write_text(yaml.safe_dump(world.config))
    (world.folder / "driver.py").write_text(DRIVER)
    (world.folder / "probe.py").write_text(PROBE.replace("{key!r}", repr(KEY.encode())))
    (world.folder / "key").write_text(KEY)
    drop_ins = folders["units"] / "tared.service.d"
    drop_ins.mkdir()
    shutil.copy(UNIT, folders["units"])
    if getattr(request, "param", "") == "jit-hardened":
        shutil.copy(DROP_IN, drop_ins)
    text = FOR_TEST.format(
        python=sys.executable,
        root=ROOT,
        log=tmp_path / "log",
        sandbox=sandbox_of_this_interpreter(),
        start_s=START_S,
        watchdog_s=WATCHDOG_S,
        abort_s=ABORT_S,
        restart_s=RESTART_S,
        **folders,
    )
    (drop_ins / "test.conf").write_text(text)
    with Machine(folders["units"], tmp_path / "systemd.log") as machine:
        yield Service(machine, tmp_path / "log", folders["switches"])


@pytest.mark.trial
@pytest.mark.broker
@pytest.mark.parametrize("service", ["as it ships", "jit-hardened"], indirect=True)
def test_the_service_serves_calibrates_hangs_and_serves_again(service: Service, any_broker: RealBroker) -> None:
    with Watcher(any_broker.endpoint) as watcher:
        service.start()
        main = psutil.Process(_outside(service))
        child = _child(service, main)
        # It lowers its priorities one after the other, this one last.
        service.wait(lambda: child.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE)
        assert child.nice() == _NICE
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
        service.wait(lambda: service.said(FIRST_COMMIT))  # through the child, the store and its signature
        status = watcher.expect(Topics("default", "board").status, state="online")  # localhost was looked up
        assert status["session"]
    assert main.uids().real not in (0, os.getuid())
    assert process_status(main, "CapEff") == process_status(main, "CapBnd") == "0000000000000000"
    assert (process_status(main, "NoNewPrivs"), process_status(main, "Seccomp")) == ("1", "2")
    assert not service.said("EPERM|Operation not permitted|Traceback")

    hang = service.switches / "hang"
    hang.touch()
    service.wait(lambda: not hang.exists())
    service.wait(lambda: _has_ended(main))
    before = len(service.said("serving: .* INT8"))
    service.wait(lambda: service.restarts == 1)
    service.wait_running()
    assert service.said("in infer")  # which thread hung, by its stack
    (engine,) = service.said("event=commit artefact=(\\w+)")
    service.wait(lambda: len(service.said(f"serving: .* INT8 {engine[:6]}")) > before)  # from its state directory
    assert not service.said("event=error code=(?:artefact|store)")
    service.stop()


@pytest.mark.trial
@pytest.mark.broker
def test_a_camera_that_is_away_does_not_trip_the_watchdog(service: Service) -> None:
    service.start()
    away = service.switches / "away"
    away.touch()
    service.wait(lambda: service.said("code=camera\\."))
    until_s = time.monotonic() + 2.5 * WATCHDOG_S
    service.wait(lambda: time.monotonic() > until_s)
    away.unlink()
    service.wait(lambda: service.said("event=camera"))
    assert service.restarts == 0
    service.stop()


@pytest.mark.trial
@pytest.mark.broker
def test_a_start_may_take_as_long_as_its_builder_moves(service: Service) -> None:
    slow, until_s = service.switches / "slow", time.monotonic() + START_S + 1.0
    slow.touch()
    service.machine.systemctl("start", "--no-block", "tared.service")
    service.wait(lambda: time.monotonic() > until_s)
    assert service.machine.property("tared.service", "ActiveState") == "activating"
    slow.unlink()
    service.wait_running()
    assert service.restarts == 0
    service.stop()


@pytest.mark.trial
@pytest.mark.broker
def test_a_start_that_stands_still_is_ended_and_tried_again(service: Service) -> None:
    stuck = service.switches / "stuck"
    stuck.touch()
    service.machine.systemctl("start", "--no-block", "tared.service")
    service.wait(lambda: service.restarts == 1)
    stuck.unlink()
    service.wait_running()
    service.stop()


@pytest.mark.slow
def test_the_journal_has_priorities(tmp_path: Path) -> None:
    """Each line its own, and none of it in the text."""
    if reason := why_not():
        pytest.skip(f"systemd cannot run here: {reason}")
    for name in ("units", "world"):
        (tmp_path / name).mkdir(mode=0o755)
    source = "from agent.common.console import say_error, set_up_logging; set_up_logging('info')\nimport logging\n"
    (tmp_path / "world/say.py").write_text(f"{source}logging.warning('hot')\nlogging.info('calm')\nsay_error('over')\n")
    unit = f"""[Service]
Type=oneshot
ExecStart={sys.executable} {tmp_path}/world/say.py
Environment=PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1
"""
    (tmp_path / "units/saying.service").write_text(unit)
    with Machine(tmp_path / "units", tmp_path / "systemd.log") as machine:
        assert machine.systemctl("start", "saying.service").returncode == 0
        told: dict[str, str] = {}

        def complete() -> bool:
            lines = machine.run("journalctl", "-u", "saying", "-o", "json").stdout.splitlines()
            told.update(
                {
                    each["MESSAGE"].partition(" ")[2] or each["MESSAGE"]: each["PRIORITY"]
                    for each in map(json.loads, lines)
                }
            )
            return "over" in told

        machine.eventually(complete)
    said = ("level=WARNING at=root msg=hot", "level=INFO at=root msg=calm", "over")  # behind their time
    assert [told[text] for text in said] == ["4", "6", "3"]


def _outside(service: Service) -> int:
    """The service's main process by its id out here: the one that runs its driver, and sees its switches."""
    (pid,) = [
        each.pid
        for each in psutil.process_iter(["cmdline", "uids"])
        if "/run/world/driver.py" in (each.info["cmdline"] or [])
        and each.info["uids"].real != 0
        and _sees(each.pid, service.switches)
    ]
    return pid


def _sees(pid: int, switches: Path) -> bool:
    try:
        return Path("/proc", str(pid), "root", "run", "switches").samefile(switches)
    except OSError:  # another test's, which has just ended
        return False


def _child(service: Service, main: psutil.Process) -> psutil.Process:
    """The first job's process, once it has made itself small."""
    found: list[psutil.Process] = []

    def find() -> bool:
        found.clear()
        for each in main.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if each.nice() == _NICE:
                    found.append(each)
        return bool(found)

    service.wait(find)
    return found[0]


def _has_ended(process: psutil.Process) -> bool:
    """Return True for a zombie, too: its parent may be slow to fetch it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
