"""`tared install-service`: what it writes, what it leaves alone, and that an installed wheel has all it needs."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from places import ROOT
from systemd_unit import DROP_IN, DROP_INS, UNIT, read_unit

from agent.common.errors import AgentError
from agent.system import service_unit as installation
from agent.system.service_unit import TARED, InstallStep, SystemdService, plan_install, plan_uninstall, unit_text
from fleet.cli.main import main

LINK = Path("etc/systemd/system/multi-user.target.wants/tared.service")


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for the programs, as a virtual environment in /opt is."""
    scripts = tmp_path / "opt/tared/.venv/bin"
    scripts.mkdir(parents=True)
    (scripts / "tared").touch()
    real = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts) if name == "scripts" else real(name))
    monkeypatch.setattr(installation, "_PRIVATE", (tmp_path / "home",))
    return scripts


def install(root: Path, *arguments: str) -> None:
    assert main(["install-service", "--root", str(root), *arguments]) == 0


@pytest.mark.usefixtures("venv")
def test_the_shipped_unit_is_installed_with_its_path_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    install(tmp_path)
    unit = (tmp_path / TARED.unit_path).read_text()
    assert "ExecStart=/opt/tared/.venv/bin/tared run -c /etc/tared/config.yaml\n" in unit
    assert unit == UNIT.read_text()  # which is written for just that place
    assert os.readlink(tmp_path / LINK) == "/etc/systemd/system/tared.service"
    for path in (TARED.unit_path, TARED.config_path):
        assert (tmp_path / path).stat().st_mode & 0o777 == 0o644
        assert (tmp_path / path).parent.stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / TARED.drop_ins_path).exists()
    assert not any(step.changes for step in plan_install(tmp_path))


@pytest.mark.usefixtures("venv")
def test_a_users_configuration_stays(tmp_path: Path) -> None:
    (tmp_path / TARED.config_path).parent.mkdir(parents=True)
    (tmp_path / TARED.config_path).write_text("mine")
    install(tmp_path)
    install(tmp_path, "--uninstall")
    assert (tmp_path / TARED.config_path).read_text() == "mine"


@pytest.mark.usefixtures("venv")
def test_a_dry_run_reports_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, "--dry-run", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["changed"]
    assert [step["action"] for step in document["steps"]] == ["write", "write", "link"]
    assert not (tmp_path / "etc").exists()


@pytest.mark.usefixtures("venv")
@pytest.mark.parametrize("path", [TARED.unit_path, TARED.config_path])
def test_a_file_that_cannot_be_compared_is_an_error(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path)

    def refused(self: Path, *_: object, **__: object) -> bool:
        if self == tmp_path / path:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return True

    for question in ("is_file", "exists"):
        monkeypatch.setattr(Path, question, refused)
    assert main(["install-service", "--root", str(tmp_path), "--dry-run"]) == 2
    assert "service.unreadable" in capsys.readouterr().err


@pytest.mark.usefixtures("venv")
def test_uninstalling_leaves_nothing_of_ours_but_the_configuration(tmp_path: Path) -> None:
    install(tmp_path, "--jit-hardened", "--csi")
    laid_down = sorted((tmp_path / TARED.drop_ins_path).iterdir())
    assert [(path.name, path.read_text()) for path in laid_down] == [
        (path.name, path.read_text()) for path in sorted(DROP_INS.iterdir())
    ]
    install(tmp_path, "--uninstall")
    left = [path.relative_to(tmp_path) for path in (tmp_path / "etc").rglob("*") if not path.is_dir()]
    assert left == [TARED.config_path]
    assert not any(step.changes for step in plan_uninstall(tmp_path))


@pytest.mark.usefixtures("venv")
def test_a_link_to_a_source_tree_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    """As `systemctl enable /opt/tared/systemd/tared.service` makes it."""
    (tmp_path / "source").write_text("of the source tree")
    (tmp_path / TARED.unit_path).parent.mkdir(parents=True)
    (tmp_path / TARED.unit_path).symlink_to(tmp_path / "source")
    install(tmp_path)
    assert (tmp_path / "source").read_text() == "of the source tree"
    assert not (tmp_path / TARED.unit_path).is_symlink()


@pytest.mark.usefixtures("venv")
def test_in_an_image_nothing_is_written_through_a_link_to_this_machine(tmp_path: Path) -> None:
    root, outside = tmp_path / "opt", tmp_path / "this_machine"
    outside.mkdir()
    (root / "etc").symlink_to(outside)
    with pytest.raises(AgentError, match=r"service\.outside: .*make its links relative"):
        installation.carry_out(plan_install(root), root)
    assert not list(outside.iterdir())


@pytest.mark.usefixtures("venv")
def test_folders_that_are_there_keep_their_mode(tmp_path: Path) -> None:
    folder = (tmp_path / TARED.config_path).parent
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    install(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_running_systemd_is_notified(tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `systemctl` in place of one: this machine's own is none of a test's."""
    calls = tmp_path / "calls"
    (venv / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    (venv / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(venv), prepend=os.pathsep)
    monkeypatch.setattr(installation, "_is_running_system", lambda _: True)
    install(tmp_path, "--now")
    install(tmp_path, "--uninstall")
    assert calls.read_text().splitlines() == [
        "daemon-reload", "enable tared.service", "restart tared.service",
        "disable --now tared.service", "daemon-reload",
    ]  # fmt: skip


def test_a_systemctl_that_fails_is_an_error(tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (venv / "systemctl").write_text("#!/bin/sh\necho 'it is masked' >&2\nexit 1\n")
    (venv / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(venv), prepend=os.pathsep)
    with pytest.raises(AgentError, match=r"service\.systemctl: 'systemctl restart' ended with 1: it is masked"):
        installation.carry_out([InstallStep("run", "systemctl restart", command=("systemctl", "restart"))], tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user cannot be become without being root")
def test_without_being_root_it_says_so() -> None:
    # Imported beforehand: the other user may have no right to read this environment.
    source = """
import locale, os, sys
import agent.common.console, agent.system.service_unit
from fleet.cli.main import main
os.setuid(65534)
sys.exit(main())
"""
    command = [sys.executable, "-c", source, "install-service", "--uninstall"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: service.root: user id 65534; expected root; sudo ")


def test_a_program_that_a_service_cannot_see_is_refused(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "_PRIVATE", (venv.parent,))
    with pytest.raises(AgentError, match=r"service\.home: .*in /opt/tared"):
        unit_text()
    (venv / "tared").unlink()
    with pytest.raises(AgentError, match=r"service\.program"):
        unit_text(tmp_path)


@pytest.mark.parametrize(
    ("path", "word"),
    [("/a/b", "/a/b"), ("/a b/c", '"/a b/c"'), ("/100%/$x", "/100%%/$$x"), ('/a"b', '"/a\\"b"')],
)
def test_paths_are_words_of_a_units_command_line(path: str, word: str) -> None:
    assert installation._word(Path(path)) == word


def test_each_extra_that_a_message_a_page_or_a_container_names_is_one() -> None:
    extras = importlib.metadata.metadata("tared").get_all("Provides-Extra", [])
    sources = [
        path for package in ("agent", "calibrate", "engines", "fleet") for path in (ROOT / package).rglob("*.py")
    ]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "containers").iterdir()]
    named = re.findall(r"install_extra\([\"'](\w+)", "".join(path.read_text() for path in sources))
    for words in re.findall(r"'(?:\.|/usr/src/tared)\[([\w,]+)\]'", "".join(path.read_text() for path in pages)):
        named += words.split(",")
    assert {"demo", "fleet", "jetson", "openvino", "plot", "web"} <= set(named) <= set(extras)


@pytest.mark.trial
def test_a_wheel_of_the_source_distribution_brings_all_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty environment, with what pyproject.toml declares and no extra."""
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # also for the builder's packages
    source = tmp_path / "source"
    kept = ("agent", "calibrate", "engines", "fleet", "systemd", "docs", "config.yaml", "pyproject.toml", "README.md")
    source.mkdir()
    for name in (*kept, "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    assert len(list(tmp_path.glob("tared-*.tar.gz"))) == 1
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([*pip, "install", "--constraint", constraints, str(wheel)], check=True, timeout=240)
    (page,) = (tmp_path / "venv/lib").glob("python*/site-packages/agent/labelling/templates")
    assert {path.name for path in page.iterdir()} == {"label.css", "label.html", "label.js"}
    shared = tmp_path / "venv/share/tared/systemd"
    assert (tmp_path / "venv/share/man/man1/tared.1").is_file()
    units = {f"tared{part}.service" for part in ("", "-collector", "-controller", "-web")}
    assert {path.name for path in shared.iterdir()} == {*units, "tared.service.d", "config.yaml"}
    # The interpreter of the tests may lie in a home, which a service could not see.
    program = (
        "from agent.system import service_unit as unit; unit._PRIVATE = (); from fleet.cli.main import main; main()"
    )
    root = tmp_path / "root"
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-c", program, "install-service", "--root", str(root), "--jit-hardened"]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=120)
    assert f"ExecStart={tmp_path}/venv/bin/tared run" in (root / TARED.unit_path).read_text()
    (drop_in,) = (root / TARED.drop_ins_path).iterdir()
    assert drop_in.read_text() == DROP_IN.read_text()
    assert (root / TARED.config_path).exists()
    tared = [str(tmp_path / "venv/bin/tared")]
    done = subprocess.run(
        [*tared, "config", "--example"], check=True, env=environment, cwd=tmp_path, capture_output=True
    )
    assert done.stdout == (ROOT / "config.yaml").read_bytes()
    done = subprocess.run([*tared, "doctor", "--json"], check=True, env=environment, cwd=tmp_path, capture_output=True)
    assert json.loads(done.stdout)["ok"] is True
    assert (tmp_path / "venv/share/tared/docs/schemas/config.schema.json").is_file()


@pytest.mark.usefixtures("venv")
def test_a_second_service_shares_nothing_with_the_first(tmp_path: Path) -> None:
    install(tmp_path, "--csi")
    before = {path: path.read_bytes() for path in (tmp_path / "etc").rglob("*") if path.is_file()}
    install(tmp_path, "--name", "yard", "--csi", "--jit-hardened")
    assert all(path.read_bytes() == content for path, content in before.items())
    yard = SystemdService.from_name("yard")
    unit = (tmp_path / yard.unit_path).read_text()
    assert "ExecStart=/opt/tared/.venv/bin/tared run -c /etc/tared-yard/config.yaml\n" in unit
    section = read_unit(path=tmp_path / yard.unit_path)
    assert (section["StateDirectory"], section["CacheDirectory"]) == ("tared-yard", "tared-yard")
    shared = [line for line in unit.splitlines() if re.search(r"/(etc|var/lib|var/cache|run)/tared\b(?!-yard)", line)]
    assert shared == []
    assert os.readlink(tmp_path / yard.link_path) == "/etc/systemd/system/tared-yard.service"
    assert len(list((tmp_path / yard.drop_ins_path).iterdir())) == 2
    assert not any(step.changes for step in plan_install(tmp_path, service=yard))
    install(tmp_path, "--name", "yard", "--uninstall")
    assert not (tmp_path / yard.unit_path).exists()
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("name", ["", "yard-", "Yard", "a/b", "..", "a b", "x" * 33, "%i"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install-service", "--root", str(tmp_path), "--name", name]) == 2
    assert capsys.readouterr().err.startswith("error: service.name: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("venv")
def test_a_service_is_known_by_its_configuration(tmp_path: Path) -> None:
    install(tmp_path)
    install(tmp_path, "--name", "yard")
    for service in (TARED, SystemdService.from_name("yard")):
        assert SystemdService.from_config(tmp_path / service.config_path, tmp_path) == service
    (tmp_path / SystemdService.from_name("yard").unit_path).unlink()
    assert SystemdService.from_config(tmp_path / "etc/tared-yard/config.yaml", tmp_path) is None
    (tmp_path / "tared").mkdir()
    assert SystemdService.from_config(tmp_path / "tared/config.yaml", tmp_path) is None
