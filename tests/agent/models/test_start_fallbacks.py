"""A start succeeds with any state on the disk, and reports why another engine serves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from candidate_bench import saved_model
from runtime_under_test import RUNTIME
from zoo import residual_net

from agent.models.build import build_artefact
from agent.models.engine_service import EngineService
from agent.models.model import Model, calibrate
from calibrate.errors import TaredError
from engines.errors import EngineError
from engines.interface import Backend, silent
from engines.registry import open_backend
from engines.store.artefact import Artefact, Store


@dataclass
class Shelf:
    """A store with engines of one model, each of a calibration of its own: the one made last is the newest."""

    folder: Path
    model: Model
    backend: Backend
    made: list[Artefact]

    @property
    def store(self) -> Store:
        return Store(self.folder)

    def start(self, may_build: bool = True) -> tuple[EngineService, list[str]]:
        """A service as a daemon starts it, which serves a frame; the codes of the errors that it reported."""
        errors: list[TaredError] = []
        service = EngineService(self.model, self.backend, self.store)
        with closing(service.start(errors.append, silent, may_build)) as engine:
            assert engine.infer(np.zeros((1, 3, 8, 8), np.float32))
        return service, [error.code for error in errors]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tmp_path_factory.mktemp("stock")
    model = saved_model(folder, residual_net((1, 3, 8, 8)))
    backend, store = open_backend(RUNTIME), Store(folder / "state")
    made = []
    for light in (0.2, 0.5, 1.0):
        with closing(backend.observer(model.reference, model.placement.taps)) as observer:
            pixels = np.random.default_rng(0).uniform(size=(1, 3, 8, 8)).astype(np.float32)
            seen = observer.observe(pixels * np.float32(light)).histograms
        calibration = calibrate(model, seen, "max", 1, "test")
        made.append(build_artefact(model, backend, store.place, silent, calibration=calibration))
    return Shelf(folder / "state", model, backend, made)


@pytest.fixture
def shelf(stock: Shelf, tmp_path: Path) -> Shelf:
    """The first engine is of a regime; the second is previous, the third current."""
    shutil.copytree(stock.folder, tmp_path / "state", symlinks=True)
    store = Store(tmp_path / "state")
    made = [store.find(artefact.id) for artefact in stock.made]
    store.promote(made[1])
    store.promote(made[2])
    return Shelf(tmp_path / "state", stock.model, stock.backend, made)


def damage(artefact: Artefact, *names: str) -> None:
    for name in names:
        file = artefact.path / name
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def test_previous_serves_where_current_is_damaged(shelf: Shelf) -> None:
    damage(shelf.made[2], "engine.onnx")
    service, reported = shelf.start()
    assert (service.serving.id, reported) == (shelf.made[1].id, ["artefact.damaged"])
    assert shelf.store.target("current") == shelf.made[2].id  # its calibration is still worth something


def test_an_engine_whose_calibration_is_whole_is_built_anew_under_its_id(shelf: Shelf) -> None:
    damage(shelf.made[1], "engine.onnx", "calibration.json")
    damage(shelf.made[2], "engine.onnx")
    service, reported = shelf.start()
    assert (service.serving.id, reported) == (shelf.made[2].id, ["artefact.damaged"] * 2)
    assert shelf.store.read("current") == shelf.made[2]
    assert shelf.start()[1] == []


@pytest.mark.parametrize("cut", ["building", "exchanging"])
def test_a_power_cut_while_it_is_built_anew_leaves_what_it_is_built_from(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    (shelf.folder / "previous").unlink()
    damage(shelf.made[2], "engine.onnx")
    rename = Path.rename

    def end(*_: object) -> object:
        raise KeyboardInterrupt

    def moved(path: Path, target: Path) -> Path:
        return end() if path.suffix == ".new" else rename(path, target)  # type: ignore[return-value]  # never returns

    with monkeypatch.context() as power:
        power.setattr(*(shelf.backend, "build", end) if cut == "building" else (Path, "rename", moved))
        with pytest.raises(KeyboardInterrupt):
            shelf.start()
    service, reported = shelf.start()
    assert (service.serving.id, reported) == (shelf.made[2].id, ["artefact.damaged"])
    assert shelf.store.read("current") == shelf.made[2]
    assert not list(shelf.made[2].path.parent.glob(".*"))


def test_previous_is_built_anew_where_nothing_of_current_is_left(shelf: Shelf) -> None:
    damage(shelf.made[1], "plan.json")
    shutil.rmtree(shelf.made[2].path)
    service, reported = shelf.start()
    assert (service.serving.id, reported) == (shelf.made[1].id, ["artefact.missing", "artefact.damaged"])
    assert not service.is_degraded


def test_an_engine_that_the_runtime_refuses_is_built_anew(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    (shelf.folder / "previous").unlink()
    load, refused = shelf.backend.load, [True]

    def another_library(engine: bytes) -> object:
        if refused.pop() if refused else False:
            raise EngineError("engine.unreadable", "an engine", "one of this library", "build it again")
        return load(engine)

    monkeypatch.setattr(shelf.backend, "load", another_library)
    inode = (shelf.made[2].path / "engine.onnx").stat().st_ino
    service, reported = shelf.start()
    assert (service.serving.id, reported) == (shelf.made[2].id, ["engine.unreadable"])
    assert (service.serving.path / "engine.onnx").stat().st_ino != inode


@pytest.mark.parametrize("may_build", [True, False])
def test_an_engine_of_another_runtime_is_built_anew_unless_a_build_ended_the_process(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, may_build: bool
) -> None:
    described = {**shelf.backend.describe(), "runtime": "another"}
    monkeypatch.setattr(shelf.backend, "describe", lambda: described)
    service, reported = shelf.start(may_build=may_build)
    assert service.is_degraded is not may_build
    assert reported == ["artefact.runtime"] * (1 if may_build else 2)
    assert (shelf.store.target("current") == shelf.made[2].id) is not may_build
    assert service.rebuilt == ({shelf.made[2].id: service.serving.id} if may_build else {})


def test_the_reference_serves_degraded_where_nothing_else_can(shelf: Shelf) -> None:
    for artefact in shelf.made:
        damage(artefact, "engine.onnx", "calibration.npz")
    service, reported = shelf.start()
    assert service.is_degraded
    assert reported == ["artefact.damaged"] * 4  # both links, both calibrations
    assert service.serving.manifest["inputs"]["precision"] == "fp32"


def test_a_candidate_that_failed_its_probation_never_serves_by_itself(shelf: Shelf) -> None:
    service, _ = shelf.start()
    for artefact in shelf.made:
        service.reject(artefact, {"reason": "probation.error"})
    assert [path.name for path in shelf.store.places()] == sorted(artefact.id for artefact in shelf.made[1:])
    for artefact in shelf.made[1:]:
        damage(artefact, "manifest.json")
    assert shelf.start()[0].is_degraded


def test_a_serving_engine_stays_though_the_disk_refused_to_make_it_current(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = shelf.start()
    unsaved = service.load(shelf.made[0])
    with closing(unsaved.engine), monkeypatch.context() as refusing:
        refusing.setattr(Store, "promote", refuses)
        with pytest.raises(EngineError, match=r"store\.write"):
            service.commit(unsaved)
    service.reject(shelf.made[0], {"reason": "probation.error"})
    assert shelf.store.find(shelf.made[0].id) == shelf.made[0]


def refuses(*_: object) -> None:
    raise EngineError("store.write", "no space left", "a writable store", "check the disk")


def as_folder(link: Path) -> None:
    link.unlink()
    link.mkdir()


def as_file(link: Path) -> None:
    link.unlink()
    link.write_text("artefacts/0123456789abcdef")


def as_link(target: str) -> Callable[[Path], None]:
    def lead(link: Path) -> None:
        link.unlink()
        link.symlink_to(target)

    return lead


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (as_folder, "store.link"),
        (as_file, "store.link"),
        (as_link("artefacts/0123456789abcdef"), "artefact.missing"),
        (as_link("current"), "artefact.unreadable"),
        (as_link("/"), "artefact.missing"),
        (as_link("artefacts"), "artefact.missing"),
    ],
    ids=["folder", "file", "dangling", "loop", "outside", "store"],
)
def test_a_dangling_link_is_reported_and_previous_serves(
    shelf: Shelf, spoil: Callable[[Path], None], code: str
) -> None:
    spoil(shelf.folder / "current")
    service, reported = shelf.start()
    assert (service.serving.id, reported) == (shelf.made[1].id, [code])
    spoilt_too = shelf.folder / "previous"
    spoil(spoilt_too)
    service, reported = shelf.start()
    assert service.is_degraded  # the first engine lies in the store, but no link leads to it
    assert reported == [code, code]


def test_a_good_previous_is_not_given_up_for_a_damaged_current(shelf: Shelf) -> None:
    damage(shelf.made[2], "engine.onnx")
    shelf.store.promote(shelf.made[0])
    assert (shelf.store.target("current"), shelf.store.target("previous")) == (shelf.made[0].id, shelf.made[1].id)
