"""How the peers that made each family of models give them their images: what no graph can tell.

Each as its own demo does it: Megvii YOLOX (preproc), Ultralytics (LetterBox, default.yaml), UltraFace
(run_video_face_detect_onnx.py), FastestDet (test.py), NanoDet (its configurations), OpenCV's FaceDetectorYN,
and torchvision's reference classification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_NANODET = {"color": "bgr", "mean": [103.53, 116.28, 123.675], "std": [57.375, 57.12, 58.395]}


class Convention(NamedTuple):
    """input: keys of a spec's `input`; those left out have its defaults. score, iou: thresholds."""

    peer: str
    input: Mapping[str, Any]
    score: float = 0.3
    iou: float = 0.5


_LETTERBOXED = {"color": "rgb", "resize": "letterbox", "anchor": "center", "pad": 114, "scale": 1 / 255}
CONVENTIONS: Mapping[str, Convention] = {
    "yolox": Convention("YOLOX", {"color": "bgr", "resize": "letterbox", "anchor": "top-left", "pad": 114}, 0.3, 0.45),
    "yolov5": Convention("YOLOv5", _LETTERBOXED, 0.25, 0.45),
    "yolov8": Convention("Ultralytics", _LETTERBOXED, 0.25, 0.7),
    "end2end": Convention("Ultralytics", _LETTERBOXED, 0.25),
    "ssd": Convention("UltraFace", {"color": "rgb", "resize": "stretch", "mean": [127.0], "std": [128.0]}, 0.7, 0.3),
    "fastestdet": Convention("FastestDet", {"color": "bgr", "resize": "stretch", "scale": 1 / 255}, 0.65, 0.45),
    "nanodet": Convention("NanoDet", {"resize": "letterbox", "anchor": "center", "pad": 0, **_NANODET}, 0.35, 0.6),
    "nanodet-plus": Convention("NanoDet-Plus", {"resize": "stretch", **_NANODET}, 0.35, 0.6),
    "yunet": Convention("YuNet", {"color": "bgr", "resize": "letterbox", "anchor": "top-left", "pad": 0}, 0.9, 0.3),
    "classify": Convention("torchvision", {"color": "rgb", "resize": "stretch", "scale": 1 / 255, **_IMAGENET}),
    "raw": Convention("nobody in particular", {"color": "bgr", "resize": "letterbox", "anchor": "top-left"}),
}
