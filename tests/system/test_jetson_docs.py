"""docs/start/jetson.md: nine commands that fit the unit file, and hand the service files that it can read."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

from places import ROOT


def commands() -> list[str]:
    """The commands in order, without their numbers."""
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/start/jetson.md").read_text(), re.DOTALL)
    lines = [line.rpartition("#") for line in block.splitlines()]
    assert [number.strip() for _, _, number in lines] == [str(number) for number in range(1, len(lines) + 1)]
    return [command.strip() for command, _, _ in lines]


def test_they_put_everything_where_the_unit_looks() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(ROOT / "systemd/tared.service")
    program, _, arguments = unit["Service"]["ExecStart"].partition(" ")
    given = commands()
    assert given[1].endswith(f"cd {Path(program).parents[2]}")
    assert given[2].endswith(f" {Path(program).parents[1].name}")
    assert f"-t {Path(arguments.split()[-1]).parent} " in given[7]
    assert given[8] == f"sudo {Path(program).relative_to(Path(program).parents[2])} install-service --now"


def test_the_service_can_read_what_was_private(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    (folder / "var").mkdir(parents=True, mode=0o700)
    for name in ("config.yaml", "yolo.yaml", "yolo.onnx", "coco.txt"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o600)
    command = commands()[7].removeprefix("sudo ").replace("~/gate", str(folder)).replace("/etc", f"{tmp_path}/etc")
    subprocess.run(["sh", "-c", f"umask 077; {command}"], check=True)
    installed = tmp_path / "etc/tared"
    assert {path.name for path in installed.iterdir()} == {"config.yaml", "yolo.yaml", "yolo.onnx", "coco.txt"}
    assert installed.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in installed.iterdir())
