"""Install and remove the systemd service: plan the steps, show or carry them out.

A plan (`plan_install`, `plan_uninstall`) is a list of steps, so that --dry-run shows exactly what would be done.
"""

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

DROP_INS = ("csi.conf", "jit-hardened.conf")  # additions to the unit (systemd.unit(5)) that do not suit every board
_UNITS = Path("etc/systemd/system")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_BOOTED = Path("/run/systemd/system")  # sd_booted(3)
_PRIVATE = (Path("/home"), Path("/root"), Path("/run/user"))  # folders that ProtectHome hides from the service
_SHARE = "share/tared"  # the folder of a wheel's data files


@dataclass
class SystemdService:
    """A daemon of this machine: the name of its unit, and the places of its files below the root.

    A service with another name than `tared` is a further one, with its own model, cameras, state and credentials.
    """

    name: str = "tared"

    def __post_init__(self) -> None:
        self.unit = f"{self.name}.service"
        self.unit_path = _UNITS / self.unit
        self.drop_ins_path = _UNITS / f"{self.unit}.d"
        self.link_path = _UNITS / "multi-user.target.wants" / self.unit
        self.config_path = Path("etc") / self.name / "config.yaml"
        self.state_path = Path("var/lib") / self.name  # systemd makes it for StateDirectory=

    @classmethod
    def from_name(cls, name: str) -> SystemdService:
        """Return the further service `tared-NAME`. Raises AgentError (`service.name`)."""
        if not _NAME.fullmatch(name):
            expected = "up to 32 small letters, digits and hyphens, with no hyphen at either end"
            raise AgentError("service.name", f"the name {name!r}", expected, "choose another, such as yard")
        return cls(f"tared-{name}")

    @classmethod
    def from_config(cls, path: Path, root: Path) -> SystemdService | None:
        """Return the installed service that starts with this configuration; None without one."""
        service = cls(path.resolve().parent.name)
        is_ours = service.name == "tared" or service.name.startswith("tared-")
        is_own = is_ours and (root / service.config_path).resolve() == path.resolve()
        return service if is_own and (root / service.unit_path).exists() else None

    def with_own_folders(self, unit: str) -> str:
        """Return the text of a shipped unit or drop-in with this service's own folders."""
        if self == TARED:
            return unit
        own = re.sub(r"(/etc|/var/lib|/var/cache|/run)/tared\b", rf"\1/{self.name}", unit)
        return re.sub(r"^(\w+Directory)=tared$", rf"\1={self.name}", own, flags=re.MULTILINE)


TARED = SystemdService()


@dataclass(frozen=True)
class InstallStep:
    """One step: `action` is write, link, remove, keep or run; `what` is a path, or the command as text."""

    action: str
    what: str
    content: str = ""
    command: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.action != "keep"


def shipped_path(name: str) -> Path:
    """Return the path of a file that tared comes with, by its path in the source tree, which a wheel's is like.

    Raises AgentError (`service.files`).
    """
    folders = (Path(__file__).resolve().parents[2], Path(sysconfig.get_path("data")) / _SHARE)
    for folder in folders:
        if (folder / "systemd" / TARED.unit).is_file():
            return folder / name
    found = f"no systemd/{TARED.unit} in {' and '.join(map(str, folders))}"
    raise AgentError("service.files", found, "the files that tared comes with", "install tared again, with pip")


def shipped_file(name: str = TARED.unit) -> str:
    """Return the text of a file of the folder systemd/. Raises AgentError (`service.files`)."""
    return shipped_path(f"systemd/{name}").read_text(encoding="utf-8")


def unit_text(root: Path = Path("/"), service: SystemdService = TARED) -> str:
    """Return a service's unit whose ExecStart names this installation's `tared`, as its path once `root` is the root.

    Raises AgentError:
        service.program  `tared` is not installed
        service.home     it is installed where the service cannot see it
    """
    program = Path(sysconfig.get_path("scripts")) / "tared"
    if not program.exists():
        raise AgentError(
            "service.program",
            f"no {program}",
            "tared installed with pip",
            "pip install . in a checkout of tared, into a venv",
        )
    path = Path("/") / (program.relative_to(root.resolve()) if program.is_relative_to(root.resolve()) else program)
    for needed in (path, Path(sysconfig.get_path("stdlib"))):
        if any(needed.is_relative_to(private) for private in _PRIVATE):
            remedy = "make the virtual environment in /opt/tared, with the system's python3"
            raise AgentError(
                "service.home", str(needed), "a folder that a service may see, which is not in a home directory", remedy
            )
    lines = service.with_own_folders(shipped_file()).splitlines(keepends=True)
    start = f"ExecStart={_word(path)} run -c /{service.config_path}\n"
    return "".join(start if line.startswith("ExecStart=") else line for line in lines)


def plan_install(
    root: Path, drop_ins: Sequence[str] = (), now: bool = False, service: SystemdService = TARED
) -> list[InstallStep]:
    """Return the steps until a service is installed under `root`; where it is installed already, no step changes any.

    Args:
        root: Of this machine, or of an image.
        drop_ins: Names from DROP_INS.
        now: Also restart the service.
        service: An existing config.yaml of it is the user's, and stays.

    Raises AgentError: as `unit_text` and `shipped_file`, and `service.unreadable`.
    """
    try:
        steps = [_write(root / service.unit_path, unit_text(root, service))]
        for name in drop_ins:
            addition = service.with_own_folders(shipped_file(f"{TARED.unit}.d/{name}"))
            steps.append(_write(root / service.drop_ins_path / name, addition))
        config = root / service.config_path
        first_config = service.with_own_folders(shipped_file("config.yaml"))
        steps.append(InstallStep("keep", str(config)) if config.exists() else _write(config, first_config))
        link = root / service.link_path
        is_linked = link.is_symlink() and os.readlink(link) == f"/{service.unit_path}"
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        expected = "installed files that can be read, to compare them"
        remedy = "sudo tared install-service, with the same options"
        raise AgentError("service.unreadable", found, expected, remedy) from error
    if not _is_running_system(root):
        return [*steps, InstallStep("keep" if is_linked else "link", str(link), f"/{service.unit_path}")]
    if any(step.changes and step.what != str(config) for step in steps):
        steps.append(_systemctl("daemon-reload"))
    steps.append(InstallStep("keep", str(link)) if is_linked else _systemctl("enable", service.unit))
    return [*steps, _systemctl("restart", service.unit)] if now else steps


def plan_uninstall(root: Path, service: SystemdService = TARED) -> list[InstallStep]:
    """Return the steps that remove the service. Configuration and state are the user's, and stay."""
    paths = (service.link_path, *(service.drop_ins_path / name for name in DROP_INS), service.unit_path)
    steps = [InstallStep("remove", str(root / path)) for path in paths if os.path.lexists(root / path)]
    if _is_running_system(root) and steps:
        steps = [_systemctl("disable", "--now", service.unit), *steps, _systemctl("daemon-reload")]
    return [*steps, *(InstallStep("keep", str(path)) for path in (root / service.config_path.parent,) if path.exists())]


def carry_out(steps: Sequence[InstallStep], root: Path) -> None:
    """Carry out the steps, up to the first that fails.

    Raises AgentError:
        service.write      the system cannot be written
        service.systemctl  systemctl failed
        service.outside    a link in an image would lead outside of `root`
    """
    try:
        for step in steps:
            _carry_out_step(step, root.resolve())
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        raise AgentError(
            "service.write", found, "write access to /etc and the disk", "check the disk, and that you are root"
        ) from None


def need_root(root: Path) -> None:
    """Raise AgentError (`service.root`) for a user who may not change this machine; an image may be its user's own."""
    if root == Path("/") and os.geteuid() != 0:
        raise AgentError("service.root", f"user id {os.geteuid()}", "root", "sudo tared install-service")


def _carry_out_step(step: InstallStep, root: Path) -> None:
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
        new.replace(path)  # replaces a link of an earlier `systemctl enable`, instead of writing through it
    elif step.action == "remove":
        path.unlink(missing_ok=True)
    elif step.action == "run":
        done = subprocess.run(step.command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            found = f"'{step.what}' ended with {done.returncode}: {' '.join(done.stderr.split())}"
            raise AgentError("service.systemctl", found, "exit status 0", "see journalctl -u tared")


def _make_folder(path: Path) -> None:
    """Make a folder that the service's user can read, whatever the umask; one that exists stays as it is."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir()
        path.chmod(0o755)


def _write(path: Path, content: str) -> InstallStep:
    same = path.is_file() and not path.is_symlink() and path.read_bytes() == content.encode()
    return InstallStep("keep" if same else "write", str(path), content)


def _systemctl(*arguments: str) -> InstallStep:
    command = ("systemctl", *arguments)
    return InstallStep("run", " ".join(command), command=command)


def _is_running_system(root: Path) -> bool:
    """Return True if `root` is this machine's, and its systemd runs: it must hear of the changes."""
    return root == Path("/") and _BOOTED.is_dir() and shutil.which("systemctl") is not None


def _word(path: Path) -> str:
    """Return a path as one word of a command line in a unit (systemd.service(5), "Command lines")."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(escaped) & set(" \\\"'") else escaped
