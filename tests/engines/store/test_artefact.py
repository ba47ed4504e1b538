"""An artefact gives its own verified files, and its engine only to the runtime it was built for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from artefact_bench import ENGINE, KEY, fill

from engines.errors import EngineError
from engines.store.artefact import check_runtime, read_artefact, write_artefact
from engines.store.signing import MANIFEST, seal

RUNTIME = {"runtime": "tensorrt", "version": "10.3.0", "gpu": "Orin", "compute_capability": "8.7"}
INPUTS = {"model": "abc", "backend": RUNTIME}


@pytest.mark.parametrize("name", ["engine.onnx", "plan.json"])
def test_links_and_pipes_in_an_artefact_are_refused_even_with_the_right_bytes(tmp_path: Path, name: str) -> None:
    file = write_artefact(tmp_path / "a", INPUTS, fill, KEY).path / name
    twin = file.rename(tmp_path / "twin")
    places: list[Callable[[], object]] = [
        partial(file.symlink_to, twin),
        partial(os.mkfifo, file),
        partial(file.symlink_to, "/dev/zero"),
    ]
    for place in places:
        place()
        with pytest.raises(EngineError, match=rf"artefact\.damaged.*{name}"):
            read_artefact(tmp_path / "a", KEY)
        file.unlink()
    shutil.copy(twin, file)
    read_artefact(tmp_path / "a", KEY)


@pytest.mark.parametrize("name", ["../twin", "/etc/hostname", "nothing", ".", "..", "", "nul\0", "engine.onnx/"])
def test_a_manifest_names_only_files_in_its_directory(tmp_path: Path, name: str) -> None:
    write_artefact(tmp_path / "a", INPUTS, fill)
    (tmp_path / "twin").write_bytes(ENGINE)
    files = {"plan.json": hashlib.sha256(b"{}").hexdigest(), "engine.onnx": hashlib.sha256(ENGINE).hexdigest()}
    document = json.loads((tmp_path / "a" / MANIFEST).read_bytes())
    del document["seal"]
    for changes in ({"files": {**files, name: files["engine.onnx"]}}, {"engine": name}):
        (tmp_path / "a" / MANIFEST).write_bytes(seal({**document, **changes}, None))
        with pytest.raises(EngineError, match=r"artefact\.damaged"):
            read_artefact(tmp_path / "a")


@pytest.mark.parametrize(
    "replace",
    [
        lambda file: file.write_bytes(ENGINE + b"x"),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        lambda file: [file.rename(file.parents[1] / "twin"), file.symlink_to("../twin")],
        lambda file: (file.unlink(), os.mkfifo(file)),  # type: ignore[func-returns-value]  # two steps in a lambda
        lambda file: file.parent.rename(file.parents[1] / "b"),
    ],
    ids=["bytes", "empty", "missing", "link", "pipe", "directory"],
)
def test_an_engine_replaced_after_it_was_verified_is_not_handed_out(
    tmp_path: Path, replace: Callable[[Path], object]
) -> None:
    write_artefact(tmp_path / "a", INPUTS, fill, KEY)
    artefact = read_artefact(tmp_path / "a", KEY)
    replace(artefact.engine_path)
    with pytest.raises(EngineError, match=r"artefact\.damaged.*engine\.onnx"):
        artefact.read_engine()


def test_only_files_that_the_manifest_names_are_handed_out(tmp_path: Path) -> None:
    artefact = write_artefact(tmp_path / "a", INPUTS, fill)
    (tmp_path / "outside").write_bytes(ENGINE)
    for name in ("../outside", MANIFEST, "nothing"):
        with pytest.raises(EngineError, match=r"artefact\.damaged"):
            artefact.read_file(name)


@pytest.mark.parametrize(
    ("here", "found", "expected"),
    [
        ({**RUNTIME, "version": "11.4.0"}, "version 10.3.0", "version 11.4.0"),
        ({**RUNTIME, "gpu": "Thor", "compute_capability": "11.0"}, "gpu Orin", "gpu Thor"),
        ({**RUNTIME, "dla": "0"}, "dla unknown", "dla 0"),
        ({name: RUNTIME[name] for name in RUNTIME if name != "gpu"}, "gpu Orin", "gpu unknown"),
    ],
)
def test_an_artefact_of_another_runtime_is_refused_by_the_first_difference(
    tmp_path: Path, here: dict[str, str], found: str, expected: str
) -> None:
    artefact = write_artefact(tmp_path / "a", INPUTS, fill)
    with pytest.raises(
        EngineError, match=rf"artefact\.runtime: .* was built for {found}; expected {expected}, as this"
    ):
        check_runtime(artefact, here)


def test_an_artefact_that_does_not_say_its_runtime_is_refused(tmp_path: Path) -> None:
    artefact = write_artefact(tmp_path / "a", {"model": "abc"}, fill)
    with pytest.raises(EngineError, match=r"artefact\.runtime: .* runtime unknown; expected runtime tensorrt"):
        check_runtime(artefact, RUNTIME)


def test_an_engine_built_to_prove_that_it_builds_is_never_loaded(tmp_path: Path) -> None:
    artefact = write_artefact(tmp_path / "a", INPUTS, lambda folder: {**fill(folder), "verification_only": True})
    with pytest.raises(EngineError, match=r"artefact\.verification: .*built without the GPU.*on the board"):
        check_runtime(artefact, RUNTIME)
