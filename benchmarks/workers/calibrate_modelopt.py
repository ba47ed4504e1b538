"""python calibrate_modelopt.py MODEL IMAGES WORK: modelopt.onnx's INT8 quantization with its entropy calibration.

`quantize` is what a user calls; the phases tell its calibration from the graph work before and after it.
"""

from __future__ import annotations

import sys
from typing import Any

from phases import Phases


def main() -> None:
    phases = Phases()
    with phases.phase("imports"):
        import onnxruntime as ort
        from modelopt.onnx.quantization import quantize
        from onnxruntime.quantization import calibrate
        from pictures import PictureReader
    path, images, work = sys.argv[1:]
    reader = PictureReader(images)
    ranges: list[Any] = []
    compute = calibrate.EntropyCalibrater.compute_data

    def compute_and_keep(calibrater: Any) -> Any:
        ranges.append(compute(calibrater))
        return ranges[-1]

    calibrate.EntropyCalibrater.compute_data = compute_and_keep
    phases.wrap(reader, "get_next", "images")
    phases.wrap(ort.InferenceSession, "run", "network")
    phases.wrap(calibrate.HistogramCollector, "collect", "histograms")
    phases.wrap(calibrate.EntropyCalibrater, "compute_data", "search")
    with phases.phase("graph work"):
        quantize(
            path,
            calibration_data_reader=reader,
            calibration_method="entropy",
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            output_path=f"{work}/modelopt.onnx",
            log_level="ERROR",
        )
    phases.report(tensors=len(ranges[0].data))


if __name__ == "__main__":
    main()
