"""Artefacts: whole or refused, current and previous exchanged atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines.backend import EngineError
from engines.store import MANIFEST, Artefact, Store, find_artefact, fingerprint, read_artefact, write_artefact

INPUTS = {"model": "abc", "precision": "int8"}


def fill(directory: Path) -> Mapping[str, Any]:
    (directory / "engine.onnx").write_bytes(bytes(range(200)))
    (directory / "plan.json").write_text("{}")
    return {"engine": "engine.onnx", "latency_ms": 1.5}


def put(store: Store, number: int) -> Artefact:
    inputs = {**INPUTS, "number": number}
    return write_artefact(store.place(inputs), inputs, fill)


def test_an_artefact_reads_back_with_all_it_was_given(tmp_path: Path) -> None:
    written = write_artefact(tmp_path / "a", INPUTS, fill)
    read = read_artefact(tmp_path / "a")
    assert read.id == written.id == fingerprint(INPUTS)
    assert read.manifest["inputs"] == INPUTS
    assert read.manifest["latency_ms"] == 1.5
    assert read.engine_path.read_bytes() == bytes(range(200))
    assert set(read.manifest["files"]) == {"engine.onnx", "plan.json"}


@pytest.mark.parametrize("name", ["engine.onnx", "plan.json", MANIFEST])
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
        future.setattr("engines.store.SCHEMA", 2)
        write_artefact(tmp_path / "a", INPUTS, fill)
    with pytest.raises(EngineError, match=r"artefact\.schema.*schema 2"):
        read_artefact(tmp_path / "a")


def test_nothing_is_left_of_an_artefact_that_could_not_be_filled(tmp_path: Path) -> None:
    def broken(directory: Path) -> Mapping[str, Any]:
        fill(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match=r"artefact\.write.*No space left"):
        write_artefact(tmp_path / "a", INPUTS, broken)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_is_found_or_refused(tmp_path: Path) -> None:
    assert find_artefact(tmp_path / "a", INPUTS) is None
    written = write_artefact(tmp_path / "a", INPUTS, fill)
    found = find_artefact(tmp_path / "a", INPUTS)
    assert found is not None
    assert found.id == written.id
    with pytest.raises(EngineError, match=r"artefact\.exists"):
        find_artefact(tmp_path / "a", {"model": "another"})


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


def test_what_a_killed_process_left_unfinished_is_swept_away(tmp_path: Path) -> None:
    Store(tmp_path)
    gone, alive = (tmp_path / "artefacts" / f".abc.{pid}.new" for pid in (2**22 + 1, os.getpid()))
    gone.mkdir()
    alive.mkdir()
    Store(tmp_path)
    assert not gone.exists()
    assert alive.exists()


def test_a_damaged_artefact_makes_room_for_a_new_build(tmp_path: Path) -> None:
    store = Store(tmp_path)
    artefact = put(store, 1)
    (artefact.path / "engine.onnx").write_bytes(b"")
    assert put(store, 1).id == artefact.id


def test_the_manifest_is_for_people_too(tmp_path: Path) -> None:
    artefact = write_artefact(tmp_path / "a", INPUTS, fill)
    text = (artefact.path / MANIFEST).read_text()
    assert text.count("\n") > 5
    assert json.loads(text)["id"] == artefact.id
