"""Outputs that cannot be written, disks that fill up, interruptions: what was there stays, nothing is added."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import cv2
import psutil
import pytest
from bench import (
    Bench,
    build,
    calibrate,
    contents,
    fill,
    picture,
    small_file_system,
    without_progress,
)
from brokers import eventually
from warm_start import TalkingProcess
from zoo import Net

from fleet.cli.main import main


def test_an_output_that_holds_something_else_is_left_alone(bench: Bench) -> None:
    bench.images("holiday", picture())
    for name in ("results.jsonl", "holiday", "artefact"):
        command = ["build", bench / "model.yaml", "--precision", "fp32", "-o", bench / name]
        assert bench.refuses(*command).startswith(f"artefact.exists: {bench.folder}/{name} is there already")


@pytest.mark.parametrize("place", ["clip.avi/below", "/proc/nowhere/out"])
def test_an_output_that_cannot_be_written_is_named(bench: Bench, place: str) -> None:
    output = bench.folder / place
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", output)
    assert said.startswith(f"results.write: {output}: ")
    said = bench.refuses(*calibrate(bench)[:-1], f"{output}.json")
    assert said.startswith(f"calibration.write: {output}.json: ")
    assert bench.refuses(*build(bench)[:-1], output).startswith(f"artefact.write: {output}: ")


OUTPUTS: dict[str, tuple[Callable[[Bench, Path], list[object]], list[str]]] = {
    "calibration.json": (lambda bench, output: [*calibrate(bench)[:-1], output], ["calibration.write"]),
    "artefact": (
        lambda bench, output: [*build(bench)[:-1], output],
        ["engine.write", "calibration.write", "artefact.write"],
    ),
    "results.jsonl": (
        lambda bench, output: ["infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", output],
        ["results.write"],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_wherever_the_disk_fills_up_what_was_there_stays_and_nothing_is_added(bench: Bench, name: str) -> None:
    command, codes = OUTPUTS[name]
    refusals = 0
    with small_file_system(bench / "disk") as disk:
        if name != "artefact":
            shutil.copy(bench / name, disk)
            shutil.copy(bench / "calibration.npz", disk)
        fill(disk / "ballast")
        while True:
            before = contents(disk)
            code = main([str(argument) for argument in command(bench, disk / name)])
            output, errors = bench.captured()
            if code == 0:
                break
            said = bench.error(code, output, errors)
            assert re.match(rf"({'|'.join(codes)}): .*: No space left on device; ", said)
            assert contents(disk) == before
            refusals += 1
            with (disk / "ballast").open("r+b") as ballast:
                ballast.truncate((disk / "ballast").stat().st_size - 4096)
    assert refusals > 0


def slow_job(bench: Bench, command: str) -> list[object]:
    """A job of many seconds: a larger network over three thousand frames."""
    net = Net((1, 3, 128, 128))
    pooled = net.node("GlobalAveragePool", net.conv(net.node("Relu", net.conv("image", 3, 48)), 48, 5))
    spec = bench.spec("slow", net.model(net.node("Flatten", pooled)))
    writer = cv2.VideoWriter(str(bench / "long.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (32, 32))
    for _ in range(3000):
        writer.write(picture(128, 32))
    writer.release()
    if command == "calibrate":
        return [*calibrate(bench, spec, "long.avi"), "--count", "3000"]
    return ["infer", spec, "--frames", bench / "long.avi", "-o", bench / "results.jsonl"]


@pytest.mark.parametrize(("command", "number"), [("calibrate", signal.SIGINT), ("infer", signal.SIGTERM)])
def test_an_interrupted_job_ends_with_one_line_and_leaves_no_trace(
    bench: Bench, command: str, number: signal.Signals
) -> None:
    job = slow_job(bench, command)
    before = contents(bench.folder)
    with TalkingProcess([*map(str, job)]) as process:
        eventually(lambda: any(file.path.endswith("long.avi") for file in psutil.Process(process.pid).open_files()))
        process.send_signal(number)
        output, errors = process.communicate(timeout=45.0)
    assert (process.returncode, output, without_progress(errors)) == (130, "", "interrupted\n")
    assert contents(bench.folder) == before
