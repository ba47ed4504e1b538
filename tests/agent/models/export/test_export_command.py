"""`tared export`: a folder that is whole or not there, three lines on its use, errors that name the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import Bench, contents, small_file_system

from agent.cli.offline import EXPORT_FORMATS
from agent.models.export.command import FORMATS


def test_the_command_offers_what_is_there() -> None:
    assert tuple(FORMATS) == EXPORT_FORMATS


@pytest.mark.parametrize("to", EXPORT_FORMATS)
def test_every_format_is_a_folder_with_three_lines_on_its_use(bench: Bench, to: str) -> None:
    if to == "openvino":
        pytest.importorskip("openvino")
    printed = bench.json("export", bench / "artefact", "--to", to, "-o", bench / "out")
    assert printed.keys() == {"format", "files"}
    assert sorted(printed["files"]) == sorted(str(path) for path in (bench / "out").rglob("*") if path.is_file())
    lines = (bench / "out" / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    assert all(20 < len(line) <= 160 for line in lines)
    said = bench.text("export", bench / "artefact", "--to", to, "-o", bench / "again").split()
    assert [Path(path).name for path in said] == [Path(path).name for path in printed["files"]]


def test_a_folder_that_is_there_is_refused_or_replaced_as_said(bench: Bench) -> None:
    export = ["export", bench / "artefact", "--to", "onnx", "-o", bench / "out"]
    bench.json(*export)
    assert bench.refuses(*export).startswith("export.exists:")
    (bench / "out" / "model.onnx").write_bytes(b"older")
    bench.json(*export, "--overwrite")
    assert (bench / "out" / "model.onnx").stat().st_size > 100
    (bench / "out" / "notes.txt").write_text("somebody's work")
    assert "holds notes.txt" in bench.refuses(*export, "--overwrite")
    assert "export.exists" in bench.refuses(*export[:-1], bench / "model.onnx", "--overwrite")


def test_a_float_artefact_gives_no_int8_format(bench: Bench) -> None:
    bench.built("float", "--precision", "fp32")
    for to in ("tensorrt-cache", "onnxruntime", "ppq"):
        refusal = bench.refuses("export", bench / "float", "--to", to, "-o", bench / "out")
        assert refusal.startswith("export.float: an artefact in fp32 without an INT8 tensor")
        assert "build it with a calibration" in refusal
    bench.json("export", bench / "float", "--to", "trtexec", "-o", bench / "out")
    assert "model_fp16.onnx" not in contents(bench / "out")


def test_a_damaged_artefact_is_refused(bench: Bench) -> None:
    with (bench / "artefact" / "engine.onnx").open("ab") as file:
        file.write(b"more")
    refusal = bench.refuses("export", bench / "artefact", "--to", "onnx", "-o", bench / "out")
    assert refusal.startswith("artefact.damaged:")


def test_a_full_disk_leaves_nothing_half_written(bench: Bench) -> None:
    with small_file_system(bench.folder / "small", "8k") as disk:
        refusal = bench.refuses("export", bench / "artefact", "--to", "triton", "-o", disk / "out")
        assert refusal.startswith("artefact.write:")
        assert list(disk.iterdir()) == []
