"""FastestDet and YOLOX as a user of ONNX Runtime and supervision writes them down; in the peers' environments.

Preprocessing and decoding are those of the networks' own examples, vectorised: what the peers are timed with.
"""

from __future__ import annotations

import abc

import cv2
import numpy as np
import onnxruntime as ort
import supervision as sv

_STRIDES = (8, 16, 32)


class Detector(abc.ABC):
    """Callable: a BGR frame to sv.Detections in its pixels. One thread."""

    score_threshold = 0.0
    iou_threshold = 0.5

    def __init__(self, path: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        image = self._session.get_inputs()[0]
        self._name, self._height, self._width = image.name, image.shape[2], image.shape[3]

    def __call__(self, frame: np.ndarray) -> sv.Detections:
        tensor, scale = self.preprocess(frame)
        boxes, scores, classes = self.decode(self._session.run(None, {self._name: tensor})[0][0])
        kept = scores > self.score_threshold
        found = sv.Detections(boxes[kept] * scale, None, scores[kept], classes[kept])
        return found.with_nms(self.iou_threshold)

    @abc.abstractmethod
    def preprocess(self, frame: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The network's input, and what its pixels are in the frame's."""

    @abc.abstractmethod
    def decode(self, output: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Boxes (n, 4) x1 y1 x2 y2 in the input's pixels, and the score and class of each."""


class FastestDet(Detector):
    """https://github.com/dog-qiuqiu/FastestDet: BGR / 255, stretched; score = objectness^0.6 * class^0.4."""

    score_threshold = 0.5

    def preprocess(self, frame: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        image = cv2.resize(frame, (self._width, self._height)).astype(np.float32) / 255.0
        scale = np.array([frame.shape[1] / self._width, frame.shape[0] / self._height] * 2, np.float32)
        return image.transpose(2, 0, 1)[np.newaxis], scale

    def decode(self, output: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = output.shape[1:]
        y, x = np.mgrid[:rows, :columns]
        scores = output[0] ** 0.6 * output[5:].max(axis=0) ** 0.4
        center = np.stack(((x + np.tanh(output[1])) / columns, (y + np.tanh(output[2])) / rows), axis=-1)
        size = 1.0 / (1.0 + np.exp(-np.stack((output[3], output[4]), axis=-1)))
        boxes = np.concatenate((center - size / 2, center + size / 2), axis=-1).reshape(-1, 4)
        boxes *= np.array((self._width, self._height) * 2, np.float32)
        return boxes, scores.ravel(), output[5:].argmax(axis=0).ravel()


class Yolox(Detector):
    """https://github.com/Megvii-BaseDetection/YOLOX: BGR, letterboxed to the top left, grey 114; boxes not decoded."""

    score_threshold = 0.3

    def __init__(self, path: str) -> None:
        super().__init__(path)
        grids, strides = [], []
        for stride in _STRIDES:
            y, x = np.mgrid[: self._height // stride, : self._width // stride]
            grids.append(np.stack((x, y), axis=-1).reshape(-1, 2))
            strides.append(np.full((x.size, 1), stride))
        self._grid = np.concatenate(grids).astype(np.float32)
        self._stride = np.concatenate(strides).astype(np.float32)

    def preprocess(self, frame: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratio = min(self._height / frame.shape[0], self._width / frame.shape[1])
        inner = cv2.resize(frame, (round(frame.shape[1] * ratio), round(frame.shape[0] * ratio)))
        canvas = np.full((self._height, self._width, 3), 114, np.uint8)
        canvas[: inner.shape[0], : inner.shape[1]] = inner
        tensor = np.ascontiguousarray(canvas.transpose(2, 0, 1)[np.newaxis], np.float32)
        return tensor, np.full(4, 1.0 / ratio, np.float32)

    def decode(self, output: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        center = (output[:, :2] + self._grid) * self._stride
        size = np.exp(output[:, 2:4]) * self._stride
        boxes = np.concatenate((center - size / 2, center + size / 2), axis=1)
        return boxes, output[:, 4] * output[:, 5:].max(axis=1), output[:, 5:].argmax(axis=1)


DETECTORS = {"fastestdet": FastestDet, "yolox_nano": Yolox}
