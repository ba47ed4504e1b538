"""Upkeep of a store on a disk: what goes, what never does, and room for the next engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.config import Config
from agent.control.upkeep import StoreUpkeep
from agent.core.actions import MakeRoom
from agent.models.engine_service import EngineService
from agent.uplink.reporter import Reporter
from engines.errors import EngineError
from engines.store import files as staging
from engines.store import retention as upkeep
from engines.store.artefact import LINKS, Artefact, Store, write_artefact
from engines.store.retention import StoreCleaner, size
from engines.store.signing import read_manifest

BYTES = 1000  # size of an engine


def put(store: Store, number: int, precision: str = "int8") -> Artefact:
    """An artefact that was made at that second."""
    inputs = {"model": "m", "precision": precision, "number": number}
    if precision == "int8":
        inputs["calibration"] = {"id": "c", "method": "max"}

    def fill(folder: Path) -> Mapping[str, Any]:
        (folder / "engine.onnx").write_bytes(bytes(BYTES))
        return {"engine": "engine.onnx"}

    artefact = write_artefact(store.place(inputs), inputs, fill)
    os.utime(artefact.path, (number, number))
    return artefact


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def ids(store: Store) -> set[str]:
    return {path.name for path in store.places()}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, store: Store) -> Callable[[int], None]:
    """A disk of so many bytes, which holds the artefacts and nothing else."""

    def of(nbytes: int) -> None:
        def disk_usage(_: Path) -> SimpleNamespace:
            return SimpleNamespace(free=nbytes - size(store.root / "artefacts"))

        monkeypatch.setattr(upkeep, "shutil", SimpleNamespace(disk_usage=disk_usage))

    return of


def test_linked_pinned_and_new_artefacts_stay_and_the_rest_goes(store: Store) -> None:
    reference = put(store, 0, "fp32")
    made = [put(store, number) for number in range(1, 7)]
    store.promote(made[1])
    store.promote(made[2])
    freed = StoreCleaner(store, keep=1, reserve_bytes=0).tidy({"loaded": [made[0].id]})
    assert freed.artefacts == (made[3].id, made[4].id)
    assert freed.nbytes > 2 * BYTES
    assert ids(store) == {reference.id, *(made[index].id for index in (0, 1, 2, 5))}
    assert StoreCleaner(store, 1, 0).tidy({"loaded": [made[0].id]}).artefacts == ()


def test_a_damaged_engine_goes_though_it_is_new_unless_a_link_leads_to_it(store: Store) -> None:
    old, linked, new = (put(store, number) for number in range(3))
    store.promote(linked)
    for artefact in (linked, new):
        (artefact.path / "engine.onnx").unlink()
    assert StoreCleaner(store, 3, 0).tidy({}).artefacts == (new.id,)
    assert ids(store) == {old.id, linked.id}


def test_nothing_but_artefacts_goes_and_no_link_is_followed(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "photo").write_bytes(b"mine")
    (tmp_path / "artefacts" / "lost+found").mkdir()
    (tmp_path / "artefacts" / ("0" * 16)).symlink_to(outside)
    inside = put(store, 1)
    (inside.path / "more").symlink_to(outside)
    assert set(StoreCleaner(store, 0, 0).tidy({}).artefacts) == {"0" * 16, inside.id}
    assert [path.name for path in (tmp_path / "artefacts").iterdir()] == ["lost+found"]
    assert (outside / "photo").read_bytes() == b"mine"


def test_a_removal_that_is_cut_short_leaves_nothing_under_an_artefacts_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact = put(store, 1)

    def power_cut(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", power_cut)
        with pytest.raises(KeyboardInterrupt):
            StoreCleaner(store, 0, 0).tidy({})
    (gone,) = (store.root / "artefacts").iterdir()
    assert gone.name == f".{artefact.id}.gone"
    assert Store(store.root).places() == []
    assert not gone.exists()


def test_an_artefact_is_removed_again_after_a_removal_that_was_cut_short(store: Store) -> None:
    artefact = put(store, 1)
    left = artefact.path.with_name(f".{artefact.id}.gone")
    left.mkdir()
    (left / "engine.onnx").write_bytes(b"half")
    StoreCleaner(store, 0, 0).tidy({})
    assert list((store.root / "artefacts").iterdir()) == []


def test_room_is_made_by_unneeded_artefacts_then_by_recent_ones(store: Store, disk: Callable[[int], None]) -> None:
    made = [put(store, number) for number in range(4)]
    store.promote(made[0])
    each = size(made[0].path)
    disk(5 * each)
    tidy = StoreCleaner(store, keep=2, reserve_bytes=each)
    assert tidy.ensure_room(each, {}).artefacts == (made[1].id,)
    assert tidy.ensure_room(2 * each, {}).artefacts == (made[2].id,)
    assert ids(store) == {made[0].id, made[3].id}


def test_the_artefacts_that_make_room_are_reported(store: Store, disk: Callable[[int], None]) -> None:
    artefacts = [put(store, number) for number in range(3)]
    disk(4 * size(artefacts[0].path))
    events: list[dict[str, Any]] = []
    reporter = SimpleNamespace(event=lambda kind, **detail: events.append({"kind": kind, **detail}))
    settings = SimpleNamespace(store=SimpleNamespace(keep=3, reserve_bytes=size(artefacts[0].path)))
    service = SimpleNamespace(store=store, serving=artefacts[2])
    StoreUpkeep(cast(Config, settings), cast(EngineService, service), cast(Reporter, reporter), list).make_room(
        MakeRoom()
    )
    assert [(event["kind"], event["state"], event["removed"]) for event in events] == [
        ("store", "tidied", [artefacts[0].id])
    ]


def test_where_there_cannot_be_room_the_recent_ones_stay(store: Store, disk: Callable[[int], None]) -> None:
    made = [put(store, number) for number in range(3)]
    store.promote(made[0])
    each = size(made[0].path)
    disk(4 * each)
    with pytest.raises(EngineError, match=r"store\.room: 0 MB free on .*store\.reserve_bytes"):
        StoreCleaner(store, keep=2, reserve_bytes=each).ensure_room(4 * each, {"loaded": [made[2].id]})
    assert len(ids(store)) == 3


def test_the_cache_keeps_its_newest_of_each_kind(store: Store) -> None:
    references = Store(store.root / "cache" / "references")
    for number in range(3):
        put(references, number)
        timings = store.root / "cache" / f"trt-{number}.timings"
        costs = store.root / "cache" / f"{number}.costs"
        for file in (timings, costs):
            file.write_bytes(bytes(10))
            os.utime(file, (number, number))
    kept = StoreCleaner(store, 2, 0)
    names = [path.name for path in kept.cached() if path.is_file()]
    assert names == [f"trt-{number}.timings" for number in (2, 1, 0)] + [f"{number}.costs" for number in (2, 1, 0)]
    freed = kept.tidy({})
    assert [Path(name).name for name in freed.cached][1:] == ["trt-0.timings", "0.costs"]
    assert len(references.places()) == 2
    assert len(kept.cached()) == 6


def test_the_newest_of_the_cache_stays_where_none_is_to_be_kept(store: Store) -> None:
    references = Store(store.root / "cache" / "references")
    for number in range(2):
        put(references, number)
        timings = store.root / "cache" / f"trt-{number}.timings"
        timings.write_bytes(bytes(10))
        os.utime(timings, (number, number))
    kept = StoreCleaner(store, 0, 0)
    newest = kept.cached()[::2]
    kept.tidy({})
    assert kept.cached() == newest


@pytest.mark.parametrize("link", LINKS)
def test_verifying_finds_a_link_that_leads_out_of_the_store(store: Store, tmp_path: Path, link: str) -> None:
    for number in range(2):
        store.promote(put(store, number))
    assert StoreCleaner(store, 2, 0).verify() == (2, [])
    (store.root / link).unlink()
    (store.root / link).symlink_to(tmp_path / "elsewhere")
    count, (error,) = StoreCleaner(store, 2, 0).verify()
    assert (count, error.code, str(tmp_path / "elsewhere") in error.found) == (2, "artefact.missing", True)


@pytest.mark.parametrize("moment", ["lstat", "read", "listed"])
def test_beside_a_daemon_that_tidies_what_is_gone_meanwhile_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    made = [put(store, number) for number in range(2)]
    places = store.places()

    def read_and_remove(path: Path, key: bytes | None) -> dict[str, Any]:
        manifest = read_manifest(path, key) if moment == "listed" else {}
        staging.remove(path)
        return manifest or read_manifest(path, key)

    monkeypatch.setattr(store, "places", lambda: places)
    if moment == "lstat":
        staging.remove(made[0].path)
    with monkeypatch.context() as patch:
        if moment != "lstat":
            patch.setattr(upkeep, "read_manifest", read_and_remove)
        stored, _ = StoreCleaner(store, 3, 0).survey({})
    assert [one.id for one in stored] == ([made[1].id] if moment == "lstat" else [])
    assert StoreCleaner(store, 3, 0).verify() == (2, [])
