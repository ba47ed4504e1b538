"""The service on this machine: what installing it, or taking it away, would change, step by step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.errors import AgentError

UNIT = "tared.service"
UNIT_PATH = Path("etc/systemd/system") / UNIT
DROP_INS_PATH = Path("etc/systemd/system/tared.service.d")
DROP_INS = ("csi.conf", "jit-hardened.conf")  # by systemd.unit(5) each adds to the unit what not every board suits
CONFIG_PATH = Path("etc/tared/config.yaml")
_LINK_PATH = Path("etc/systemd/system/multi-user.target.wants") / UNIT
_BOOTED = Path("/run/systemd/system")  # sd_booted(3)
_PRIVATE = (Path("/home"), Path("/root"), Path("/run/user"))  # what ProtectHome hides from the service
_SHARE = "share/tared/systemd"  # where a wheel's data files go


@dataclass(frozen=True)
class Step:
    """One change, or why there is none: `action` is write, link, remove, keep or run; `what` a path or a command."""

    action: str
    what: str
    content: str = ""
    command: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.action != "keep"


def shipped(name: str = UNIT) -> str:
    """A file of the folder systemd/, as it came with this tared: beside the source, or with the installed wheel.

    Raises AgentError (`service.files`).
    """
    folders = (Path(__file__).resolve().parents[1] / "systemd", Path(sysconfig.get_path("data")) / _SHARE)
    for folder in folders:
        if (folder / UNIT).is_file():
            return (folder / name).read_text(encoding="utf-8")
    found = f"no {UNIT} in {' and '.join(map(str, folders))}"
    raise AgentError("service.files", found, "the files that tared comes with", "install tared again, with pip")


def unit_text(root: Path = Path("/")) -> str:
    """The unit with this installation's own `tared` in ExecStart, as it is called once `root` is the root.

    Raises AgentError: `service.program` where there is none, `service.home` where the service could not see it.
    """
    program = Path(sysconfig.get_path("scripts")) / "tared"
    if not program.exists():
        raise AgentError("service.program", f"no {program}", "tared installed with pip", "pip install tared, in a venv")
    inside = program.relative_to(root.resolve()) if program.is_relative_to(root.resolve()) else program
    path = Path("/") / inside
    for seen in (path, Path(sysconfig.get_path("stdlib"))):
        if any(seen.is_relative_to(private) for private in _PRIVATE):
            remedy = "make the virtual environment in /opt/tared, of a python3 of the system's"
            raise AgentError("service.home", str(seen), "what a service may see, which no home directory is", remedy)
    lines = shipped().splitlines(keepends=True)
    return "".join(f"ExecStart={_word(path)} run -c /{CONFIG_PATH}\n" if _starts(line) else line for line in lines)


def plan_install(root: Path, drop_ins: Sequence[str] = (), now: bool = False) -> list[Step]:
    """What is still to be done until the service is installed under `root`; a second time that is nothing.

    drop_ins: of DROP_INS. A config.yaml that is there is the user's, and stays. Raises AgentError as `unit_text` and
    `shipped`, and `service.unreadable`.
    """
    try:
        return _plan_install(root, drop_ins, now)
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        expected, remedy = "what is installed, to compare", "sudo tared install-service, with the same options"
        raise AgentError("service.unreadable", found, expected, remedy) from error


def _plan_install(root: Path, drop_ins: Sequence[str], now: bool) -> list[Step]:
    steps = [_written(root / UNIT_PATH, unit_text(root))]
    steps += [_written(root / DROP_INS_PATH / name, shipped(f"{UNIT}.d/{name}")) for name in drop_ins]
    config = root / CONFIG_PATH
    steps.append(Step("keep", str(config)) if config.exists() else _written(config, shipped("config.yaml")))
    link = root / _LINK_PATH
    linked = link.is_symlink() and os.readlink(link) == f"/{UNIT_PATH}"
    if not _running(root):
        return [*steps, Step("keep" if linked else "link", str(link), f"/{UNIT_PATH}")]
    if any(step.changes and step.what != str(config) for step in steps):
        steps.append(_run("daemon-reload"))
    steps.append(Step("keep", str(link)) if linked else _run("enable", UNIT))
    return [*steps, _run("restart", UNIT)] if now else steps


def plan_uninstall(root: Path) -> list[Step]:
    """What is to be taken away. Configuration and state are the user's, and stay."""
    running = _running(root)
    ours = (_LINK_PATH, *(DROP_INS_PATH / name for name in DROP_INS), UNIT_PATH)
    there = [path for path in ours if os.path.lexists(root / path)]
    steps = [Step("remove", str(root / path)) for path in there]
    if running and steps:
        steps = [_run("disable", "--now", UNIT), *steps, _run("daemon-reload")]
    return [*steps, *(Step("keep", str(path)) for path in (root / CONFIG_PATH.parent,) if path.exists())]


def carry_out(steps: Sequence[Step], root: Path) -> None:
    """Do it. Raises AgentError (`service.write`, `service.systemctl`, `service.outside` for what a link in an image
    would have written outside of `root`) at the first step that fails."""
    try:
        for step in steps:
            _carry_out(step, root.resolve())
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        raise AgentError("service.write", found, "a writable system", "check the disk, and that you are root") from None


def need_root(root: Path) -> None:
    """Raises AgentError (`service.root`) for who may not change this machine; an image may be its user's own."""
    if root == Path("/") and os.geteuid() != 0:
        raise AgentError("service.root", f"user id {os.geteuid()}", "root", "sudo tared install-service")


def _carry_out(step: Step, root: Path) -> None:
    path = Path(step.what)
    if step.action != "run" and not path.parent.resolve().is_relative_to(root):
        found = f"{path.parent}, a link to {path.parent.resolve()}"
        raise AgentError("service.outside", found, f"a folder in {root}", "make its links relative")
    if step.action in ("write", "link"):
        _make_folder(path.parent)
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        if step.action == "link":
            new.symlink_to(step.content)
        else:
            new.write_text(step.content, encoding="utf-8")
            new.chmod(0o644)
        new.replace(path)  # a link of an earlier `systemctl enable` is replaced, not written through
    elif step.action == "remove":
        path.unlink(missing_ok=True)
    elif step.action == "run":
        done = subprocess.run(step.command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            found = f"'{step.what}' ended with {done.returncode}: {' '.join(done.stderr.split())}"
            raise AgentError("service.systemctl", found, "success", "see journalctl -u tared")


def _make_folder(path: Path) -> None:
    """Readable whatever the umask: the service, a user of its own, reads what lies here. One that is there stays so."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir()
        path.chmod(0o755)


def _written(path: Path, content: str) -> Step:
    same = path.is_file() and not path.is_symlink() and path.read_bytes() == content.encode()
    return Step("keep" if same else "write", str(path), content)


def _run(*arguments: str) -> Step:
    command = ("systemctl", *arguments)
    return Step("run", " ".join(command), command=command)


def _running(root: Path) -> bool:
    """Whether it is this machine's own systemd that is to know of it."""
    return root == Path("/") and _BOOTED.is_dir() and shutil.which("systemctl") is not None


def _starts(line: str) -> bool:
    return line.startswith("ExecStart=")


def _word(path: Path) -> str:
    """A path as one word of a command line in a unit (systemd.service(5), "Command lines")."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(escaped) & set(" \\\"'") else escaped
