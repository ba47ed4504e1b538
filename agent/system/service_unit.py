"""The service on this machine: what installing it, or taking it away, would change, step by step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.common.errors import AgentError

DROP_INS = ("csi.conf", "jit-hardened.conf")  # by systemd.unit(5) each adds to the unit what not every board suits
_UNITS = Path("etc/systemd/system")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_BOOTED = Path("/run/systemd/system")  # sd_booted(3)
_PRIVATE = (Path("/home"), Path("/root"), Path("/run/user"))  # what ProtectHome hides from the service
_SHARE = "share/tared/systemd"  # where a wheel's data files go


@dataclass(frozen=True)
class SystemdService:
    """A daemon of this machine, by the name of its unit, and where its files lie below the root.

    Another than `tared` is a second one beside it, with a model, cameras, state and credentials of its own.
    """

    name: str = "tared"

    @classmethod
    def from_name(cls, name: str) -> SystemdService:
        """The one that somebody calls so, beside the first one. Raises AgentError (`service.name`)."""
        if not _NAME.fullmatch(name):
            expected = "up to 32 small letters, digits and hyphens, with no hyphen at either end"
            raise AgentError("service.name", f"the name {name!r}", expected, "choose another, such as yard")
        return cls(f"tared-{name}")

    @classmethod
    def from_config(cls, path: Path, root: Path) -> SystemdService | None:
        """The one that starts with this configuration; None where none does."""
        service = cls(path.resolve().parent.name)
        known = service.name == "tared" or service.name.startswith("tared-")
        is_own = known and (root / service.config_path).resolve() == path.resolve()
        return service if is_own and (root / service.unit_path).exists() else None

    @property
    def unit(self) -> str:
        return f"{self.name}.service"

    @property
    def unit_path(self) -> Path:
        return _UNITS / self.unit

    @property
    def drop_ins_path(self) -> Path:
        return _UNITS / f"{self.unit}.d"

    @property
    def link_path(self) -> Path:
        return _UNITS / "multi-user.target.wants" / self.unit

    @property
    def config_path(self) -> Path:
        return Path("etc") / self.name / "config.yaml"

    @property
    def state_path(self) -> Path:
        """What StateDirectory= makes of the name."""
        return Path("var/lib") / self.name

    def with_own_folders(self, unit: str) -> str:
        """A unit or an addition to one, as it ships, with this service's own folders."""
        if self == TARED:
            return unit
        own = re.sub(r"(/etc|/var/lib|/var/cache|/run)/tared\b", rf"\1/{self.name}", unit)
        return re.sub(r"^(\w+Directory)=tared$", rf"\1={self.name}", own, flags=re.MULTILINE)


TARED = SystemdService()


@dataclass(frozen=True)
class InstallStep:
    """One change, or why there is none: `action` is write, link, remove, keep or run; `what` a path or a command."""

    action: str
    what: str
    content: str = ""
    command: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.action != "keep"


def shipped_file(name: str = TARED.unit) -> str:
    """A file of the folder systemd/, as it came with this tared: beside the source, or with the installed wheel.

    Raises AgentError (`service.files`).
    """
    folders = (Path(__file__).resolve().parents[2] / "systemd", Path(sysconfig.get_path("data")) / _SHARE)
    for folder in folders:
        if (folder / TARED.unit).is_file():
            return (folder / name).read_text(encoding="utf-8")
    found = f"no {TARED.unit} in {' and '.join(map(str, folders))}"
    raise AgentError("service.files", found, "the files that tared comes with", "install tared again, with pip")


def unit_text(root: Path = Path("/"), service: SystemdService = TARED) -> str:
    """A service's unit with this installation's own `tared` in ExecStart, as it is called once `root` is the root.

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
    lines = service.with_own_folders(shipped_file()).splitlines(keepends=True)
    start = f"ExecStart={_word(path)} run -c /{service.config_path}\n"
    return "".join(start if line.startswith("ExecStart=") else line for line in lines)


def plan_install(
    root: Path, drop_ins: Sequence[str] = (), now: bool = False, service: SystemdService = TARED
) -> list[InstallStep]:
    """What is still to be done until a service is installed under `root`; a second time that is nothing.

    drop_ins: of DROP_INS. A config.yaml that is there is the user's, and stays. Raises AgentError as `unit_text` and
    `shipped_file`, and `service.unreadable`.
    """
    try:
        return _plan_install(root, drop_ins, now, service)
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        expected, remedy = "what is installed, to compare", "sudo tared install-service, with the same options"
        raise AgentError("service.unreadable", found, expected, remedy) from error


def _plan_install(root: Path, drop_ins: Sequence[str], now: bool, service: SystemdService) -> list[InstallStep]:
    steps = [_written(root / service.unit_path, unit_text(root, service))]
    for name in drop_ins:
        addition = service.with_own_folders(shipped_file(f"{TARED.unit}.d/{name}"))
        steps.append(_written(root / service.drop_ins_path / name, addition))
    config = root / service.config_path
    first = service.with_own_folders(shipped_file("config.yaml"))
    steps.append(InstallStep("keep", str(config)) if config.exists() else _written(config, first))
    link = root / service.link_path
    linked = link.is_symlink() and os.readlink(link) == f"/{service.unit_path}"
    if not _running(root):
        return [*steps, InstallStep("keep" if linked else "link", str(link), f"/{service.unit_path}")]
    if any(step.changes and step.what != str(config) for step in steps):
        steps.append(_run("daemon-reload"))
    steps.append(InstallStep("keep", str(link)) if linked else _run("enable", service.unit))
    return [*steps, _run("restart", service.unit)] if now else steps


def plan_uninstall(root: Path, service: SystemdService = TARED) -> list[InstallStep]:
    """What is to be taken away. Configuration and state are the user's, and stay."""
    running = _running(root)
    ours = (service.link_path, *(service.drop_ins_path / name for name in DROP_INS), service.unit_path)
    there = [path for path in ours if os.path.lexists(root / path)]
    steps = [InstallStep("remove", str(root / path)) for path in there]
    if running and steps:
        steps = [_run("disable", "--now", service.unit), *steps, _run("daemon-reload")]
    return [*steps, *(InstallStep("keep", str(path)) for path in (root / service.config_path.parent,) if path.exists())]


def carry_out(steps: Sequence[InstallStep], root: Path) -> None:
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


def _carry_out(step: InstallStep, root: Path) -> None:
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


def _written(path: Path, content: str) -> InstallStep:
    same = path.is_file() and not path.is_symlink() and path.read_bytes() == content.encode()
    return InstallStep("keep" if same else "write", str(path), content)


def _run(*arguments: str) -> InstallStep:
    command = ("systemctl", *arguments)
    return InstallStep("run", " ".join(command), command=command)


def _running(root: Path) -> bool:
    """Whether it is this machine's own systemd that is to know of it."""
    return root == Path("/") and _BOOTED.is_dir() and shutil.which("systemctl") is not None


def _word(path: Path) -> str:
    """A path as one word of a command line in a unit (systemd.service(5), "Command lines")."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(escaped) & set(" \\\"'") else escaped
