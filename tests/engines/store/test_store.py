"""Artefacts: whole or refused, current and previous exchanged atomically."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from artefact_bench import ENGINE, KEY, fill, reseal

from engines.errors import EngineError
from engines.store.artefact import Artefact, Store, find_artefact, fingerprint, read_artefact, write_artefact
from engines.store.signing import MANIFEST

INPUTS = {"model": "abc", "precision": "int8"}


def put(store: Store, number: int) -> Artefact:
    inputs = {**INPUTS, "number": number}
    return write_artefact(store.place(inputs), inputs, fill, store.key)


def test_an_artefact_reads_back_with_all_it_was_given(tmp_path: Path) -> None:
    written = write_artefact(tmp_path / "a", INPUTS, fill)
    read = read_artefact(tmp_path / "a")
    assert read.id == written.id == fingerprint(INPUTS)
    assert read.manifest["inputs"] == INPUTS
    assert read.manifest["latency_ms"] == 1.5
    assert read.engine_path.read_bytes() == read.read_engine() == written.read_engine() == ENGINE
    assert read.read_file("plan.json") == b"{}"
    assert set(read.manifest["files"]) == {"engine.onnx", "plan.json"}


def test_a_store_behind_a_link_keeps_what_is_current_and_previous(tmp_path: Path) -> None:
    """As systemd's DynamicUser lays it out: /var/lib/tared leads to private/tared."""
    (tmp_path / "private/tared").mkdir(parents=True)
    (tmp_path / "tared").symlink_to("private/tared")
    store = Store(tmp_path / "tared")
    first, second = put(store, 1), put(store, 2)
    for artefact in (first, second):
        store.promote(read_artefact(artefact.path))
    for root in (tmp_path / "tared", tmp_path / "private/tared"):
        current, previous = Store(root).read("current"), Store(root).read("previous")
        assert current is not None
        assert previous is not None
        assert (current.id, previous.id) == (second.id, first.id)
    store.replace("current", read_artefact(first.path))
    assert store.target("current") == first.id


def test_facts_of_a_builder_do_not_replace_those_of_the_store(tmp_path: Path) -> None:
    claims = {"schema": 7, "id": "another", "inputs": {}, "files": {}}
    written = write_artefact(tmp_path / "a", INPUTS, lambda folder: {**fill(folder), **claims})
    assert read_artefact(tmp_path / "a").manifest == written.manifest
    assert (written.manifest["id"], written.manifest["inputs"]) == (fingerprint(INPUTS), INPUTS)


@pytest.mark.parametrize("name", ["engine.onnx", "plan.json"])
def test_any_changed_byte_of_any_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_artefact(tmp_path / "a", INPUTS, fill)
    path = tmp_path / "a" / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        with pytest.raises(EngineError, match=name):
            read_artefact(tmp_path / "a")
    path.write_bytes(whole[:-1])
    with pytest.raises(EngineError, match=name):
        read_artefact(tmp_path / "a")


def test_missing_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    write_artefact(tmp_path / "a", INPUTS, fill)
    (tmp_path / "a" / "stray.txt").write_text("x")
    with pytest.raises(EngineError, match=r"artefact\.damaged.*stray\.txt"):
        read_artefact(tmp_path / "a")
    (tmp_path / "a" / "stray.txt").unlink()
    (tmp_path / "a" / "plan.json").unlink()
    with pytest.raises(EngineError, match=r"plan\.json"):
        read_artefact(tmp_path / "a")
    with pytest.raises(EngineError, match=r"artefact\.missing"):
        read_artefact(tmp_path / "nothing")


def test_a_manifest_of_a_newer_schema_is_not_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as future:
        future.setattr("engines.store.artefact.SCHEMA", 2)
        write_artefact(tmp_path / "a", INPUTS, lambda folder: {**fill(folder), "inputs": "moved"})
    for key in (None, KEY):
        with pytest.raises(EngineError, match=r"artefact\.schema.*schema 2"):
            read_artefact(tmp_path / "a", key)


def test_nothing_is_left_of_an_artefact_that_could_not_be_filled(tmp_path: Path) -> None:
    def broken(directory: Path) -> Mapping[str, Any]:
        fill(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match=r"artefact\.write.*No space left"):
        write_artefact(tmp_path / "a", INPUTS, broken)
    assert list(tmp_path.iterdir()) == []


def test_an_artefact_that_is_there_already_is_found_or_refused(tmp_path: Path) -> None:
    assert find_artefact(tmp_path / "a", INPUTS) is None
    written = write_artefact(tmp_path / "a", INPUTS, fill)
    found = find_artefact(tmp_path / "a", INPUTS)
    assert found is not None
    assert found.id == written.id
    (tmp_path / "loop").symlink_to("loop")
    for name, inputs, key in (("a", {"model": "another"}, None), ("a", INPUTS, KEY), ("loop", INPUTS, None)):
        with pytest.raises(EngineError, match=r"artefact\.exists"):
            find_artefact(tmp_path / name, inputs, key)


def test_promote_and_roll_back_exchange_current_and_previous(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.read("current") is None
    first, second = put(store, 1), put(store, 2)
    store.promote(first)
    assert store.read("previous") is None
    store.promote(second)
    store.promote(second)  # again: nothing changes
    current, previous = store.read("current"), store.read("previous")
    assert current is not None
    assert previous is not None
    assert (current.id, previous.id) == (second.id, first.id)
    store.promote(previous)
    swapped = store.read("current")
    assert swapped is not None
    assert swapped.id == first.id
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_store_that_moved_keeps_its_links(tmp_path: Path) -> None:
    store = Store(tmp_path / "old")
    store.promote(put(store, 1))
    os.rename(tmp_path / "old", tmp_path / "new")
    assert Store(tmp_path / "new").read("current") is not None


def test_remains_of_a_killed_process_are_swept_away(tmp_path: Path) -> None:
    Store(tmp_path)
    gone, alive = (tmp_path / "artefacts" / f".abc.{pid}.new" for pid in (2**22 + 1, os.getpid()))
    gone.mkdir()
    alive.mkdir()
    Store(tmp_path)
    assert not gone.exists()
    assert alive.exists()


def test_files_of_other_programs_are_not_swept_away(tmp_path: Path) -> None:
    Store(tmp_path)
    strays = [tmp_path / "artefacts" / name for name in (".new", ".x.new", ".x.y.new", ".x.1x.new")]
    for stray in strays:
        stray.mkdir()
    Store(tmp_path)
    assert all(stray.exists() for stray in strays)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "engine.onnx").write_bytes(b""),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: reseal(path, latency_ms=0.1),
        lambda path: [path.rename(path.parent / "moved"), path.symlink_to("moved")],
        lambda path: [path.rename(path.parent / "moved"), path.symlink_to("nowhere")],
        lambda path: [path.rename(path.parent / "moved"), path.symlink_to(path.name)],
        lambda path: [path.rename(path.parent / "moved"), path.write_text("a file")],
    ],
    ids=["engine", "manifest", "resealed", "link", "dangling link", "looping link", "file"],
)
def test_a_damaged_artefact_makes_room_for_a_new_build(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    store = Store(tmp_path, KEY)
    artefact = put(store, 1)
    damage(artefact.path)
    again = put(store, 1)
    assert (again.id, again.path) == (artefact.id, artefact.path)
    store.promote(again)
    assert store.read("current") == again


def test_a_place_that_cannot_be_cleared_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    artefact = put(store, 1)
    (artefact.path / "engine.onnx").write_bytes(b"")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(EngineError, match=r"store\.write.*Operation not permitted"):
        store.place(artefact.manifest["inputs"])


def test_only_artefacts_of_the_stores_key_serve(tmp_path: Path) -> None:
    unsigned = Store(tmp_path)
    unsigned.promote(put(unsigned, 1))
    store = Store(tmp_path, KEY)
    with pytest.raises(EngineError, match=r"artefact\.signature"):
        store.read("current")
    store.promote(put(store, 1))
    current = store.read("current")
    assert current is not None
    assert unsigned.read("current") == current
    with pytest.raises(EngineError, match=r"artefact\.signature"):
        Store(tmp_path, b"another key, long enough").read("current")


def test_an_artefact_under_anothers_name_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, KEY)
    old, new = put(store, 1), put(store, 2)
    store.promote(new)
    new.path.rename(tmp_path / "aside")
    old.path.rename(new.path)
    with pytest.raises(
        EngineError, match=rf"artefact\.place: artefact {old.id} in .*{new.id}; expected it in .*{old.id}"
    ):
        store.read("current")
    assert put(store, 2).id == new.id  # room was made


def test_an_artefact_outside_of_the_store_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", KEY)
    store.promote(put(Store(tmp_path / "elsewhere", KEY), 1))
    with pytest.raises(EngineError, match=r"artefact\.place"):
        store.read("current")


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for target in ("current", "previous", "artefacts/nothing", "artefacts"):
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(target)
        with pytest.raises(EngineError, match=r"artefact\.(missing|unreadable)"):
            store.read("current")


def test_a_first_link_that_is_made_while_it_is_looked_for_is_no_folder_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one process reads the store in the instant in which another makes its first engine current."""
    store = Store(tmp_path)
    artefact, is_symlink = put(store, 1), Path.is_symlink

    def look(path: Path) -> bool:
        found = is_symlink(path)
        if path.name == "current" and not found:
            monkeypatch.setattr(Path, "is_symlink", is_symlink)
            store.promote(artefact)
        return found

    monkeypatch.setattr(Path, "is_symlink", look)
    assert store.read("current") is None
    assert store.read("current") == artefact
