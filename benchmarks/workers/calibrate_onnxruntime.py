"""python calibrate_onnxruntime.py MODEL IMAGES BINS WORK: ONNX Runtime's entropy calibration.

As quantize_static does it. BINS count the signed range: 4096 of them resolve |x| as 2048 bins do; 128 is the default.
"""

from __future__ import annotations

import sys

from phases import Phases


def main() -> None:
    phases = Phases()
    with phases.phase("imports"):
        from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator
        from pictures import PictureReader
    path, images, bins, work = sys.argv[1:]
    with phases.phase("model preparation"):
        calibrator = create_calibrator(
            path,
            augmented_model_path=f"{work}/augmented.onnx",
            calibrate_method=CalibrationMethod.Entropy,
            extra_options={"num_bins": int(bins), "symmetric": True},
        )
        reader = PictureReader(images)
    phases.wrap(reader, "get_next", "images")
    phases.wrap(calibrator.infer_session, "run", "network")
    with phases.phase("histograms"):
        calibrator.collect_data(reader)
    with phases.phase("search"):
        data = calibrator.compute_data()
    phases.report(tensors=len(data.data))


if __name__ == "__main__":
    main()
