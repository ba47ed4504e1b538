"""python calibrate_tared.py calibrate ARGUMENTS...: `tared calibrate ARGUMENTS` with its time told by phase.

The functions where one phase ends and another begins are wrapped in timers; the command is the real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from phases import Phases


def main() -> None:
    phases = Phases()
    sys.path.insert(0, os.getcwd())
    with phases.phase("imports"):
        from agent.cli import main as cli
        from agent.cli import offline_runs as module
        from agent.vision import task as vision
        from engines import onnxruntime_backend as runtime
    offline_runs: Any = module  # its functions are replaced
    results: list[dict[str, Any]] = []
    phases.wrap(offline_runs, "open_model", "model preparation")
    phases.wrap(runtime.OnnxRuntimeObserver, "__init__", "model preparation")
    phases.wrap(vision.VisionTask, "preprocess", "images")
    phases.wrap(runtime.OnnxRuntimeEngine, "infer", "network")
    phases.wrap(runtime.OnnxRuntimeObserver, "observe", "histograms")
    phases.wrap(offline_runs.CalibrationSet, "add", "histograms")
    phases.wrap(offline_runs, "calibrate", "search")
    phases.wrap(offline_runs, "save_calibration", "writing")
    read_images = offline_runs.read_images

    def timed_images(*arguments: Any) -> Iterator[Any]:
        images = iter(read_images(*arguments))
        while True:
            with phases.phase("images"):
                image = next(images, None)
            if image is None:
                return
            yield image

    run_calibrate = offline_runs.run_calibrate

    def run_and_keep(*arguments: Any) -> dict[str, Any]:
        results.append(run_calibrate(*arguments))
        return results[-1]

    offline_runs.run_calibrate = run_and_keep
    offline_runs.read_images = timed_images
    with phases.phase("the rest of the command"):
        status = cli.main(sys.argv[1:])
    if status == 0:
        phases.report(tensors=results[0]["tensors"])
    raise SystemExit(status)


if __name__ == "__main__":
    main()
