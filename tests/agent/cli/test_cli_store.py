"""`tared store`: what lies on the disk, whether it is whole, and away with the rest; beside a daemon only looking."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept import kept_in, spoil
from worlds import SPEC

from agent.cli.configuration import load_board_config
from agent.monitoring.drift import Regime
from agent.monitoring.regimes import RegimeStore
from engines.errors import EngineError
from engines.store.artefact import Artefact, Store, write_artefact
from engines.store.retention import StoreCleaner
from fleet.cli.main import main

KEY = b"sixteen bytes ok"


class Desk:
    """A state directory with a float reference and five engines, the last current, the one before previous."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.store = Store(self.state)
        self._capfd = capfd
        (folder / "model.onnx").write_bytes(b"")
        camera = {"source": "clip.avi"}
        config = {"model": SPEC, "state_dir": "state", "camera": camera, "store": {"keep": 2}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.reference = self.put(0, precision="fp32")
        self.made = [self.put(number, precision="int8", calibration={"method": "mse"}) for number in range(1, 6)]
        for artefact in self.made[-2:]:
            self.store.promote(artefact)

    def put(self, number: int, **inputs: object) -> Artefact:
        def fill(folder: Path) -> Mapping[str, Any]:
            (folder / "engine.onnx").write_bytes(bytes(100))
            return {"engine": "engine.onnx", "verdict": {"fidelity": 0.875}}

        inputs = {"model": "m", "number": number, **inputs}
        artefact = write_artefact(self.store.place(inputs), inputs, fill)
        os.utime(artefact.path, (number, number))
        return artefact

    def tared(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr of `tared store`."""
        code = main(["store", *arguments, "-c", str(self.folder / "config.yaml")])
        captured = self._capfd.readouterr()
        return code, captured.out, captured.err

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        exit_code, output, errors = self.tared(*arguments, "--json")
        assert (exit_code, errors) == (code, "")
        printed = json.loads(output)
        assert isinstance(printed, dict)
        return printed

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """Holds the state as a daemon does."""
        with (self.state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@pytest.fixture
def desk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capfd)


def test_list_shows_each_artefact_and_its_use(desk: Desk) -> None:
    (desk.made[1].path / "engine.onnx").unlink()
    os.utime(desk.made[1].path, (2, 2))
    (desk.state / "cache").mkdir()
    (desk.state / "cache" / "trt.timings").write_bytes(bytes(30))
    with desk.daemon():
        printed = desk.json("list")
    rows = printed["artefacts"]
    assert [row["id"] for row in rows] == [desk.reference.id, *(artefact.id for artefact in desk.made)]
    assert [row["roles"] for row in rows] == [["reference"], [], [], [], ["previous", "recent"], ["current", "recent"]]
    assert [row["trouble"] for row in rows] == [None, None, "artefact.damaged", None, None, None]
    last = {key: rows[-1][key] for key in ("precision", "fidelity", "method")}
    assert last == {"precision": "int8", "fidelity": 0.875, "method": "mse"}
    assert rows[-1]["bytes"] > 100
    assert printed["cached"] == {"cache/trt.timings": 30}
    assert printed["free_bytes"] > 0


def test_list_is_a_table_for_people(desk: Desk) -> None:
    (desk.made[1].path / "manifest.json").write_text("{}")
    code, output, _ = desk.tared("list")
    lines = output.splitlines()
    assert code == 0
    assert lines[0].split() == ["id", "made", "precision", "bytes", "fidelity", "method", "roles", "trouble"]
    (last,) = (line for line in lines if desk.made[-1].id in line)
    assert {"int8", "0.875", "mse", "current,", "recent"} <= set(last.split())
    (broken,) = (line for line in lines if desk.made[1].id in line)
    assert broken.split()[-1] == "artefact.damaged"
    assert "0 cached" in lines[-1]


def test_verify_reads_every_byte_and_exits_1_for_damage(desk: Desk) -> None:
    with desk.daemon():
        assert desk.json("verify") == {"artefact_count": 6, "damaged": []}
    engine = desk.made[0].path / "engine.onnx"
    engine.write_bytes(bytes(99) + b"x")
    (found,) = desk.json("verify", code=1)["damaged"]
    assert found["code"] == "artefact.damaged"
    assert str(engine) in found["found"]
    code, output, _ = desk.tared("verify")
    assert code == 1
    assert output.splitlines()[-1] == "6 artefacts, 1 found damaged"


def test_verify_with_a_key_takes_what_it_has_not_signed_as_damaged(desk: Desk) -> None:
    key = desk.folder / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    printed = desk.json("verify", "--key", str(key), code=1)
    assert {error["code"] for error in printed["damaged"]} == {"artefact.signature"}


def test_gc_removes_the_artefacts_of_its_dry_run_alone(desk: Desk) -> None:
    RegimeStore(kept_in(desk.state), "i", 5).learn(Regime(desk.made[0].id, {}, {}, {}))
    dry = desk.json("gc", "--dry-run")
    assert dry["removed"] == [artefact.id for artefact in desk.made[1:3]]
    assert len(desk.store.places()) == 6
    printed = desk.json("gc")
    assert printed == {**dry, "dry_run": False}
    assert printed["freed_bytes"] > 200
    left = {path.name for path in desk.store.places()}
    assert left == {desk.reference.id, *(desk.made[index].id for index in (0, 3, 4))}
    code, output, _ = desk.tared("gc")
    assert (code, output.split(";")[0]) == (0, "0 removed, 0 bytes")


def test_gc_as_json_does_not_ask_for_free_space_that_it_does_not_print(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: StoreCleaner) -> int:
        raise EngineError("artefact.unreadable", "a disk that fails", "one that answers", "check it")

    monkeypatch.setattr(StoreCleaner, "free_bytes", refused)
    assert len(desk.json("gc", "--dry-run")["removed"]) == 3
    code, _, errors = desk.tared("gc", "--dry-run")
    assert (code, errors.split(":")[1]) == (2, " artefact.unreadable")


def test_gc_while_a_daemon_holds_the_state_is_refused(desk: Desk) -> None:
    with desk.daemon():
        code, output, errors = desk.tared("gc")
    assert (code, output) == (2, "")
    assert errors.startswith("error: state.locked: another daemon on ")
    assert len(desk.store.places()) == 6


def newer_regimes(desk: Desk) -> None:
    kept_in(desk.state)
    spoil(desk.state, "PRAGMA user_version = 99")


def no_store(desk: Desk) -> None:
    desk.state.rename(desk.folder / "elsewhere")


@pytest.mark.parametrize(("change", "code"), [(newer_regimes, "state.schema"), (no_store, "store.missing")])
def test_gc_guesses_at_nothing(desk: Desk, change: Callable[[Desk], None], code: str) -> None:
    before = len(desk.store.places())
    change(desk)
    exit_code, output, errors = desk.tared("gc")
    assert (exit_code, output) == (2, "")
    assert errors.startswith(f"error: {code}: ")
    found = list(desk.folder.rglob("manifest.json"))
    assert len(found) == before


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_configuration_of_a_service_leads_to_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """systemd names the directory to the daemon alone; `tared store` finds it by the installed unit."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    path = tmp_path / "etc/tared/config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({"model": SPEC, "camera": {"source": "clip.avi"}}))
    (path.parent / "model.onnx").write_bytes(b"")
    if is_installed:
        unit = tmp_path / "etc/systemd/system/tared.service"
        unit.parent.mkdir(parents=True)
        unit.write_text("[Service]\n")
    state_dir = load_board_config(path, tmp_path).state_dir
    assert state_dir == (tmp_path / "var/lib/tared" if is_installed else path.parent / "var")
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
